"""A seccomp profile of our own for agents' containers, where the engine's lets them have sockets to the hypervisor.

An engine takes one profile, so where its own is not enough the whole list has to be ours. It refuses what Docker's
default refuses to a container without capabilities, and besides io_uring (as newer defaults do), rarer families of
sockets, programs of other architectures (32 bits on a 64-bit machine, which have another way to the same sockets), and
reading another process's memory without tracing it.
"""

from __future__ import annotations

import functools
import json
import socket
from typing import Any

_ALLOWED = """
accept accept4 access adjtimex alarm arch_prctl bind brk cachestat capget capset chdir chmod chown clock_getres
clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group
faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr
flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futex_requeue futex_wait
futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid
getgid getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid
getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr inotify_add_watch inotify_init
inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_setup io_submit ioctl ioprio_get
ioprio_set kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lgetxattr link linkat listen
listxattr llistxattr lremovexattr lseek lsetxattr lstat madvise membarrier memfd_create memfd_secret mincore mkdir
mkdirat mknod mknodat mlock mlock2 mlockall mmap modify_ldt mprotect mq_getsetattr mq_notify mq_open mq_timedreceive
mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at
nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free
pkey_mprotect poll ppoll prctl pread64 preadv preadv2 prlimit64 process_mrelease pselect6 ptrace pwrite64 pwritev
pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages removexattr rename
renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn
rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity
sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam
sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop sendfile sendmmsg sendmsg sendto
set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid setpriority
setregid setresgid setresuid setreuid setrlimit setsid setsockopt setuid setxattr shmat shmctl shmdt shmget shutdown
sigaltstack signalfd signalfd4 socketpair splice stat statfs statx symlink symlinkat sync sync_file_range
sync_file_range2 syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime
timer_settime timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat utime
utimensat utimes vfork vmsplice wait4 waitid write writev
"""
"""System calls that are allowed whatever their arguments, of x86-64 and ARM64. Others are refused with EPERM, and those
that are newer than all of these with ENOSYS, which the container runtime sees to."""

FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Which of them lead anywhere is the network namespace's to say."""

NAMESPACES = 0x7E020000
"""The flags of clone() that make namespaces."""

PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux's own, with short addresses, with the version of Linux 2.6, with both; and the question which one it is."""

ENOSYS = 38


@functools.cache
def profile() -> str:
    """The profile as JSON, as the Docker Engine takes it in `SecurityOpt`."""
    rules: list[dict[str, Any]] = [
        {"names": _ALLOWED.split(), "action": "SCMP_ACT_ALLOW"},
        # The kernel takes a family as an int and does not look at the upper half of the register: nor may a comparison,
        # or 2**32 + AF_VSOCK is some other family.
        *[_allow_if("socket", "SCMP_CMP_MASKED_EQ", 0xFFFFFFFF, int(family)) for family in FAMILIES],
        _allow_if("clone", "SCMP_CMP_MASKED_EQ", NAMESPACES, 0),
        *[_allow_if("personality", "SCMP_CMP_EQ", value) for value in PERSONALITIES],
        # Its flags lie in memory, where no filter looks. C libraries fall back to clone.
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
    ]
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ERRNO",
            "archMap": [
                {"architecture": name, "subArchitectures": []} for name in ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")
            ],
            "syscalls": rules,
        }
    )


def _allow_if(name: str, comparison: str, value: int, other: int = 0) -> dict[str, Any]:
    """Allow a call when its first argument compares so."""
    first = {"index": 0, "value": value, "valueTwo": other, "op": comparison}
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": [first]}

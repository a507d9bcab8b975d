"""Towards other machines and this one's listeners. See attempts.py."""

import ctypes
import os
import socket
import struct

from attempts import c, connected, read, tried


def sent(family, kind, protocol, data, address):
    with socket.socket(family, kind, protocol) as sock:
        sock.sendto(data, address)


def tcp_to_the_host(task):
    return [(host, tried(connected, socket.AF_INET, (host, task["tcp"]))) for host in task["hosts"]]


def elsewhere(task):
    """Where a datagram does not go to itself."""
    return [host for host in task["hosts"] if not host.startswith("127.")]


def udp_to_the_host(task):
    arguments = (socket.AF_INET, socket.SOCK_DGRAM, 0, b"x")
    return [(host, tried(sent, *arguments, (host, task["udp"]))) for host in elsewhere(task)]


def ipv6_to_the_host(task):
    places = [*task["hosts6"], "2001:db8::1"]
    found = [(host, tried(connected, socket.AF_INET6, (host, task["tcp"]))) for host in places]
    data = (socket.AF_INET6, socket.SOCK_DGRAM, 0, b"x")
    return found + [(f"udp {host}", tried(sent, *data, (host, task["udp"]))) for host in places]


def dns(task):
    query = b"\1\1\1\0\0\1\0\0\0\0\0\0\7example\3org\0\0\1\0\1"
    lines = read("/etc/resolv.conf").decode().splitlines()
    servers = [line.split()[1] for line in lines if line.startswith("nameserver")]
    found = [("the system's way", tried(socket.gethostbyname, "example.org"))]
    for server in [*servers, *elsewhere(task)]:
        found.append((server, tried(sent, socket.AF_INET, socket.SOCK_DGRAM, 0, query, (server, task["udp"]))))
    return found


def raw_sockets(task):
    return [
        ("icmp", tried(socket.socket, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)),
        ("ip", tried(socket.socket, socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)),
        ("packets", tried(socket.socket, socket.AF_PACKET, socket.SOCK_RAW, 0x0300)),
    ]


def ping(task):
    echo = struct.pack("!BBHHH", 8, 0, 0xF7FF, 0, 0)
    arguments = (socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP, echo)
    return [(host, tried(sent, *arguments, (host, 0))) for host in elsewhere(task)]


def listeners_on_the_hosts_loopback(task):
    return [
        ("tcp", tried(connected, socket.AF_INET, ("127.0.0.1", task["tcp"]))),
        ("an abstract socket", tried(connected, socket.AF_UNIX, f"\0{task['abstract']}")),
        ("a socket by its path", tried(connected, socket.AF_UNIX, task["path"])),
        ("by the path of init", tried(connected, socket.AF_UNIX, f"/proc/1/root{task['path']}")),
    ]


def sockets_to_the_hypervisor(task):
    """To have one is enough: nobody is called with it, as it would not be anybody of the test's."""
    number = {"x86_64": 41, "aarch64": 198}[os.uname().machine]
    wide = [ctypes.c_long(one) for one in (number, 2**32 + socket.AF_VSOCK, socket.SOCK_STREAM, 0)]
    return [
        ("vsock", tried(socket.socket, socket.AF_VSOCK, socket.SOCK_STREAM)),
        ("vsock behind what the kernel does not look at", tried(c, "syscall", *wide)),
    ]


def a_way_out_of_its_own(task):
    """A default route and a device, asked of the kernel by netlink, and a tunnel."""

    def asked(kind, body):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
            sock.send(struct.pack("=IHHII", 16 + len(body), kind, 0x605, 1, 0) + body)
            code = struct.unpack_from("=i", sock.recv(4096), 16)[0]
        if code:
            raise OSError(-code, "netlink")

    lo = socket.if_nametoindex("lo")
    route = struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 254, 3, 0, 1, 0) + struct.pack("=HHI", 8, 4, lo)
    device = struct.pack("=BBHiII", 0, 0, 0, 0, 0, 0) + struct.pack("=HH", 20, 18 | 0x8000)
    device += struct.pack("=HH", 10, 1) + b"dummy\0\0\0"
    return [
        ("route", tried(asked, 24, route)),
        ("device", tried(asked, 16, device)),
        ("tunnel", tried(os.open, "/dev/net/tun", os.O_RDWR)),
    ]


ATTEMPTS = (
    tcp_to_the_host,
    udp_to_the_host,
    ipv6_to_the_host,
    dns,
    raw_sockets,
    ping,
    listeners_on_the_hosts_loopback,
    sockets_to_the_hypervisor,
    a_way_out_of_its_own,
)

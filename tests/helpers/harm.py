"""Agents that try to harm the machine, the rollouts beside them or the way to their own grade; and some that work.

`main()` plays the role that the task names. None writes the right answer, `42`, but `works`. Standard library only.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

MARK = "aglite-test-straggler"
MB = 1 << 20


def works():
    """Five calls of the model over some seconds, then the answer."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    for _ in range(5):
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        urllib.request.urlopen(request, timeout=100).read()
        time.sleep(0.5)
    with open("answer", "w") as file:
        file.write("42")


def fork_bomb():
    end = time.monotonic() + 3
    main = os.getpid()
    while time.monotonic() < end:
        try:
            os.fork()
        except OSError:
            time.sleep(0.01)
    if os.getpid() != main:
        time.sleep(1000)


def memory_bomb():
    hold = []
    while True:
        hold.append(b"x" * MB)


def memory_in_files():
    """Not its own memory but that of the file systems which are held in it."""
    for folder in ("/dev/shm", "/tmp", os.environ["HOME"], "."):
        try:
            with open(f"{folder}/big", "wb") as file:
                while True:
                    file.write(b"x" * MB)
        except OSError:
            continue


def very_many_files():
    os.mkdir("many")
    try:
        for number in range(10**7):
            os.close(os.open(f"many/{number}", os.O_CREAT))
    except OSError:
        pass


def log_flood():
    end = time.monotonic() + 3
    while time.monotonic() < end:
        os.write(1, b"x" * MB)
        os.write(2, b"\n" * MB)


def log_that_is_slow_to_search():
    print("= " + "1 passed " * 80_000)


def connections_without_end():
    """All that the gateway's door would take, from several processes, none of them ever asking anything."""
    host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
    for _ in range(7):
        if os.fork() == 0:
            break
    held = []
    end = time.monotonic() + 4
    while time.monotonic() < end:
        try:
            held.append(socket.create_connection((host, int(port)), timeout=1))
            if len(held) % 3 == 0:
                held[-1].send(b"POST /v1/chat/completions HTTP/1.1\r\nx: " + b"y" * 5000)
        except OSError:
            time.sleep(0.05)


def headers_without_end():
    host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        try:
            for number in range(600):
                sock.sendall(b"x-%d: " % number + b"y" * MB + b"\r\n")
        except OSError:
            pass


def daemon_that_goes_on_working():
    """In a session of its own, without its environment, deaf to signals: it writes the answer when all seems over."""
    code = f"""
import os, signal, time
for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
print("deaf", flush=True)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
while os.path.exists("/proc/{os.getpid()}"): time.sleep(0.05)
time.sleep(3)
while True:
    open("answer", "w").write("42")
    time.sleep(0.05)
"""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    subprocess.Popen(["env", "-i", "setsid", sys.executable, "-c", code, MARK], **output).stdout.readline()


def zombies():
    for _ in range(20):
        if os.fork() == 0:
            if os.fork() == 0:
                time.sleep(0.1)
            os._exit(0)
    time.sleep(0.5)


def kill_all():
    subprocess.Popen(["sleep", "100"])
    os.kill(-1, signal.SIGKILL)


def killed_as_by_the_machine():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_code_of_the_machines():
    os._exit(137)


def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def prints_a_reward():
    print('{"reward": 1.0}')
    print("===== 12 passed in 0.11s =====")


def writes_to_the_terminal():
    raise SystemExit("\x1b]0;owned\x07\x1b[2J[bold red]\u202egnp.exe\x9b31m")


def odd_names():
    names = [
        "--checkpoint-action=exec=sh x",
        "-rf",
        "a\nb",
        "..\\up",
        "C:x",
        " ",
        "\u202e",
        "x" * 255,
        "$(id)",
        "`id`",
        "*",
    ]
    for name in names:
        with open(name, "w") as file:
            file.write("x")
    with open(b"\xff\xed\xa0\x80", "w") as file:
        file.write("x")
    for at in (-(2**40), 2**40):
        os.utime(names[0], (at, at))
    os.makedirs("/".join(["d" * 200] * 9))


def links_and_specials():
    os.symlink("/etc/passwd", "absolute")
    os.symlink("../" * 12 + "etc/passwd", "climbing")
    os.symlink("/proc/self/root/etc/passwd", "by-proc")
    os.mkdir("in")
    os.symlink("..", "in/up")
    os.symlink("in/up/..", "out")
    os.symlink("loop", "loop")
    os.symlink("out/work/agent.py", "answer")
    os.link("/rollout/task.json", "hard")
    os.mkfifo("fifo")
    socket.socket(socket.AF_UNIX).bind("socket")
    with open("sparse", "wb") as file:
        file.truncate(1 << 42)


def another_folder_in_place_of_its_own():
    os.rename("/rollout/work", "/rollout/elsewhere")
    os.symlink("/etc", "/rollout/work")
    os.rename("/rollout/home", "/rollout/h")
    os.symlink("/", "/rollout/home")


def nothing_is_readable():
    os.mkdir("shut")
    with open("shut/answer", "w") as file:
        file.write("x")
    for place in ("shut/answer", "shut", ".", "/rollout/home", "/rollout"):
        os.chmod(place, 0)


def main():
    with open(os.environ["AGLITE_TASK_FILE"]) as file:
        globals()[json.load(file)["role"]]()

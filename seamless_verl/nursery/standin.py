"""The stand-in: run as the interpreter, it asks the nursery for a process and lives exactly as long as that one.

Executed as ``python -I -S standin.py SOCKET INTERPRETER ARGUMENTS…``; imports little, because it is started often.
"""

import json
import os
import signal
import socket
import sys

HEADER = 8


def main() -> int:
    address, interpreter, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
    files = _open_files()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(address)
        _send(connection, arguments, files)
        pid = int.from_bytes(receive(connection, HEADER), "little")
    except OSError:
        os.execv(interpreter, [interpreter, *arguments])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, _: os.kill(pid, received))
    for file in files:
        if file > 2:
            os.close(file)  # their other ends wait for the process to close them, not for us
    try:
        return int.from_bytes(receive(connection, HEADER), "little")
    except OSError:
        return 1  # the nursery was killed, and whoever depends on this process will want to know


def _open_files() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc/self/fd") if _is_open(int(name)))


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False  # the descriptor that listed the folder
    return True


def _send(connection: socket.socket, arguments: list[str], files: list[int]) -> None:
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "files": files,
        "ignored": [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
    }
    data = json.dumps(request).encode()
    socket.send_fds(connection, [len(data).to_bytes(HEADER, "little")], files)
    connection.sendall(data)


def receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, whole; also what the nursery reads with."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the other side closed the connection")
        data += part
    return data


if __name__ == "__main__":
    sys.exit(main())

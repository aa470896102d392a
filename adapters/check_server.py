"""Server that forks a process for each check of an upload: `python -I -S -c BOOT ROOT PARENT_PID`.

Imports would take nine tenths of an ordinary check's CPU time (0.09 s of 0.1 s), so one process imports once and forks.

Standard input is a Unix socket. Each byte received on it carries the descriptor of one check's socket, from which the
server reads the job (JSON) and to which the forked check writes its result. The server appends a line with the exit
status of a check that has ended, negative for a signal, and closes the socket. It kills the check if the client shuts
down its side of the socket.
"""

import os
import select
import signal
import socket
from contextlib import suppress
from typing import NoReturn

from adapters.check import die_with, run

# Code of the command line above. -S skips site-packages, so that the start takes only a tenth of a second; sys.path
# then needs this package's folder. Niceness 10 leaves all checks a tenth of a core that other processes keep busy.
BOOT = (
    "import os, sys; os.nice(10); sys.path.insert(0, sys.argv[1]); "
    "from adapters.check_server import serve; serve(int(sys.argv[2]))"
)
MAX_JOB_BYTES = 2**20


def serve(parent: int) -> None:
    """Serve jobs until the parent closes the control socket. The kernel kills every process when its parent dies."""
    die_with(parent)
    control = socket.socket(fileno=0)
    # `select` cannot wait for processes, so SIGCHLD writes to this pair of sockets.
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    checks: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([control, ended, *checks.values()], [], [])
        if ended in readable:
            ended.recv(4096)
            _report_ended(checks)
        if control in readable:
            byte, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not byte:
                return
            if descriptors:  # else this process has no free one, and the client finds its socket closed
                _fork_check(socket.socket(fileno=descriptors[0]), checks, [control, ended, wake])
        for pid, client in checks.items():
            if client in readable:
                os.kill(pid, signal.SIGKILL)


def _fork_check(client: socket.socket, checks: dict[int, socket.socket], server_sockets: list[socket.socket]) -> None:
    """Start the check of a client and add it to `checks`. server_sockets: closed by the check."""
    job, parent = client.recv(MAX_JOB_BYTES), os.getpid()
    try:
        pid = os.fork()
    except OSError:
        # No further process is possible now. Other checks continue, and the client finds its socket closed.
        client.close()
        return
    if pid == 0:
        _be_check(job, parent, client, [*server_sockets, *checks.values()])
    checks[pid] = client


def _report_ended(checks: dict[int, socket.socket]) -> None:
    """Append the exit status to the result of each check that has ended."""
    while checks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with checks.pop(pid) as client, suppress(OSError):
            client.sendall(b"\n%d" % os.waitstatus_to_exitcode(status))


def _be_check(job: bytes, parent: int, client: socket.socket, inherited: list[socket.socket]) -> NoReturn:
    """Run a check in the forked process and end the process."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for sock in inherited:
            sock.close()
        code, out = run(job, parent)
        client.sendall(out)
    finally:
        os._exit(code)

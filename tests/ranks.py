"""Several processes of one run on this machine, as a launcher would start them, each running the same Python text."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(**more) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parent}", **more}


def run_ranks(text: str, world: int, *arguments, timeout: float = 300) -> list[str]:
    """What each rank printed; a rank that fails, and one that hangs beyond the time-out, fails the test."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", text, *map(str, arguments)],
            env=environment(**address, LOCAL_RANK=str(rank), RANK=str(rank), NODE_RANK="0"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        found = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, errors) in zip(processes, found, strict=True):
        assert process.returncode == 0, (out[-1000:], errors[-3000:])
    return [out for out, _ in found]


def members(session: int) -> list[int]:
    """Processes of a session that still live; a test starts a run as a session of its own."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, its = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue  # it has just ended
            if int(its) == session and state != "Z":
                found.append(int(entry.name))
    return found


def kill_session(session: int) -> None:
    for pid in members(session):
        os.kill(pid, signal.SIGKILL)

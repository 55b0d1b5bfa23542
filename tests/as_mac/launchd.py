"""launchd for one user, as far as `vlm-server service` asks it, with its texts and exit codes.

It listens for its jobs and keeps these sockets while they restart, starts a job when somebody
connects, starts it again after a failure but not at once, and lets it finish when it has to go.
From launchctl(1), launchd.plist(5) and what `launchctl` of macOS 13 to 15 prints; a real one has
not been asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import plistlib
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.as_mac import job_text

BACKLOG = 128
"""What macOS allows (`kern.ipc.somaxconn`)."""
SOFT_FILES = 256
_CLIENT = """\
#!{python} -SE
import json, socket, sys
asking = socket.socket(socket.AF_UNIX)
asking.connect({path!r})
asking.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
code, out, err = json.loads(asking.makefile().readline())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""

NO_SUCH_PROCESS = 3
INPUT_OUTPUT_ERROR = 5
IN_PROGRESS = 36
NO_SUCH_SERVICE = 113
NO_SUCH_DOMAIN = 125
WRONG_SESSION = 134
_REASONS = {
    NO_SUCH_PROCESS: "No such process",
    INPUT_OUTPUT_ERROR: "Input/output error",
    IN_PROGRESS: "Operation now in progress",
    NO_SUCH_DOMAIN: "Domain does not support specified action",
    WRONG_SESSION: "Service cannot load in requested session",
}
_SESSIONS = {"gui": "Aqua", "user": "Background"}


class Refusal(Exception):
    """A command's exit code and output."""

    def __init__(self, code: int, doing: str = "", text: str = "") -> None:
        super().__init__(text or f"{doing} failed: {code}: {_REASONS[code]}")
        self.code = code


@dataclass
class Job:
    """A loaded file, its sockets, and the process, if there is one."""

    domain: str
    path: Path
    plist: dict[str, Any]
    sockets: dict[str, socket.socket]
    process: subprocess.Popen[bytes] | None = None
    status: int | None = None
    """As subprocess has it: of the last process, negative for a signal."""
    runs: int = 0
    started: float = float("-inf")
    due: float | None = None
    """When it is to be started."""
    kill_at: float | None = None
    is_leaving: bool = False
    watched: list[int] = field(default_factory=list)
    """Descriptors that tell that its process has ended."""

    @property
    def label(self) -> str:
        return str(self.plist["Label"])

    @property
    def target(self) -> str:
        return f"{self.domain}/{self.label}"


class Launchd:
    """Jobs of this user. `folder` gets the program `launchctl` and a log of its commands.

    has_screen: whether the user has logged in at the screen, which makes the domain `gui`.
    environment: what its jobs find beside launchd's own. throttle: the shortest time between two
    starts of a job, in seconds: 10 on a Mac.
    """

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        *,
        has_screen: bool = True,
        throttle: float = 0.5,
    ) -> None:
        self.domains = {f"user/{os.getuid()}"} | ({f"gui/{os.getuid()}"} if has_screen else set())
        self.disabled: set[str] = set()
        self.commands: list[list[str]] = []
        self._environment = environment
        self._throttle = throttle
        self._folder = folder
        self._jobs: dict[str, Job] = {}
        self._lock = threading.RLock()
        self._is_closed = False
        self._wake, self._woken = socket.socketpair()
        self._address = folder / "launchd"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._address))
        self._listener.listen()
        client = folder / "launchctl"
        client.write_text(_CLIENT.format(python=sys.executable, path=str(self._address)))
        client.chmod(0o755)
        self._thread = threading.Thread(target=self._work, name="launchd")
        self._thread.start()

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """`launchctl ...` without a process; other programs are run."""
        if words[0] != "launchctl":
            return subprocess.run(words, capture_output=True, text=True, check=False)
        code, out, err = self.answer(list(words[1:]))
        return subprocess.CompletedProcess(words, code, out, err)

    def answer(self, words: list[str]) -> tuple[int, str, str]:
        """Exit code, output and complaint of `launchctl WORDS`."""
        with self._lock:
            self.commands.append(words)
            try:
                out = getattr(self, f"_{words[0]}")(*words[1:])
            except Refusal as refusal:
                return refusal.code, "", f"{refusal}\n"
            finally:
                self._wake.send(b"x")
        return 0, out or "", ""

    def pid(self) -> int:
        """The process id of the only job."""
        with self._lock:
            (job,) = self._jobs.values()
            assert job.process is not None
            return job.process.pid

    def close(self) -> None:
        """End all jobs at once."""
        with self._lock:
            self._is_closed = True
            for job in self._jobs.values():
                if job.process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(job.process.pid, signal.SIGKILL)
                    job.process.wait()
                for listener in job.sockets.values():
                    listener.close()
        self._wake.send(b"x")
        self._thread.join()
        for channel in (self._listener, self._wake, self._woken):
            channel.close()

    # ---- what launchctl can do -----------------------------------------------------------

    def _print(self, target: str) -> str:
        domain, label = self._split(target)
        if domain not in self.domains:
            said = f"Could not print domain: {NO_SUCH_DOMAIN}: {_REASONS[NO_SUCH_DOMAIN]}"
            raise Refusal(NO_SUCH_DOMAIN, text=said)
        if not label:
            return f"{domain} = {{\n\ttype = login\n}}\n"
        return job_text.print_text(self._find(target))

    def _bootstrap(self, domain: str, path: str) -> None:
        if domain not in self.domains:
            raise Refusal(NO_SUCH_DOMAIN, "Bootstrap")
        plist = plistlib.loads(Path(path).read_bytes())
        target = f"{domain}/{plist['Label']}"
        if target in self._jobs or target in self.disabled:
            raise Refusal(INPUT_OUTPUT_ERROR, "Bootstrap")
        sessions = plist.get("LimitLoadToSessionType", "Aqua")
        if _SESSIONS[domain.partition("/")[0]] not in sessions:
            raise Refusal(WRONG_SESSION, "Bootstrap")
        job = Job(domain, Path(path), plist, {})
        for name, wanted in plist.get("Sockets", {}).items():
            with contextlib.suppress(OSError):  # another program has the address
                job.sockets[name] = _listening(wanted)
        if plist.get("RunAtLoad"):
            job.due = time.monotonic()
        self._jobs[target] = job

    def _bootout(self, target: str) -> None:
        job = self._jobs.get(target)
        if job is None:
            raise Refusal(NO_SUCH_PROCESS, "Boot-out")
        job.is_leaving, job.due = True, None
        if job.process is None:
            self._forget(job)
            return
        self._signal(job, signal.SIGTERM)
        job.kill_at = time.monotonic() + job.plist.get("ExitTimeOut", 20)
        raise Refusal(IN_PROGRESS, "Boot-out")

    def _enable(self, target: str) -> None:
        self.disabled.discard(target)

    def _disable(self, target: str) -> None:
        self.disabled.add(target)

    def _kickstart(self, target: str) -> None:
        job = self._find(target)
        if job.process is None:
            self._schedule(job)

    def _kill(self, name: str, target: str) -> None:
        job = self._find(target)
        if job.process is None:
            raise Refusal(NO_SUCH_PROCESS, text="No process to signal.")
        self._signal(job, signal.Signals[name])

    # ---- what it does by itself ----------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._is_closed:
                    return
                seconds = self._start_due()
                watched = self._watched()
            with selectors.PollSelector() as selector:
                for descriptor in {*watched, self._listener.fileno(), self._woken.fileno()}:
                    selector.register(descriptor, selectors.EVENT_READ)
                ready = {key.fd for key, _ in selector.select(seconds)}
            with self._lock:
                if self._woken.fileno() in ready:
                    self._woken.recv(1 << 12)
                for descriptor in ready & set(watched):
                    self._happened(watched[descriptor], descriptor)
            if self._listener.fileno() in ready:
                self._serve()

    def _watched(self) -> dict[int, Job]:
        """Ends of processes, and the sockets of jobs without one: a client starts it."""
        found = {}
        for job in self._jobs.values():
            found.update(dict.fromkeys(job.watched, job))
            if job.process is None and job.due is None:
                found.update({listener.fileno(): job for listener in job.sockets.values()})
        return found

    def _start_due(self) -> float | None:
        """Start and kill all jobs that are due; returns the seconds until the next one is."""
        now, times = time.monotonic(), []
        for job in self._jobs.values():
            if job.due is not None and job.due <= now:
                job.due = None
                self._start(job)
            if job.kill_at is not None and job.kill_at <= now:
                job.kill_at = None
                self._signal(job, signal.SIGKILL)
            times += [moment for moment in (job.due, job.kill_at) if moment is not None]
        return max(0.0, min(times) - now) if times else None

    def _happened(self, job: Job, descriptor: int) -> None:
        if descriptor not in job.watched:
            self._schedule(job)
            return
        assert job.process is not None
        job.status, job.process, job.kill_at = job.process.wait(), None, None
        job.watched.remove(descriptor)
        os.close(descriptor)
        if job.is_leaving:
            self._forget(job)
        elif job.status and job.plist.get("KeepAlive") == {"SuccessfulExit": False}:
            self._schedule(job)

    def _schedule(self, job: Job) -> None:
        job.due = max(time.monotonic(), job.started + self._throttle)

    def _start(self, job: Job) -> None:
        descriptors = {name: each.fileno() for name, each in job.sockets.items()}
        taken = self._folder / f"taken-{job.label}-{job.runs}"
        own = {
            "AS_MAC_SOCKETS": ",".join(f"{name}={fd}" for name, fd in descriptors.items()),
            "AS_MAC_SOCKETS_TAKEN": str(taken),
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "XPC_SERVICE_NAME": job.label,
        }
        with Path(job.plist["StandardOutPath"]).open("ab") as output:
            job.process = subprocess.Popen(
                job.plist["ProgramArguments"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env={**own, **self._environment},
                pass_fds=list(descriptors.values()),
                umask=job.plist.get("Umask", 0o022),
                start_new_session=True,
            )
        limits = job.plist.get("SoftResourceLimits", {})
        _, hard = resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE)
        files = min(limits.get("NumberOfFiles", SOFT_FILES), hard)
        resource.prlimit(job.process.pid, resource.RLIMIT_NOFILE, (files, hard))
        job.watched.append(os.pidfd_open(job.process.pid))
        job.started, job.runs = time.monotonic(), job.runs + 1

    def _serve(self) -> None:
        asking, _ = self._listener.accept()
        with asking, asking.makefile("rw") as stream:
            stream.write(json.dumps(self.answer(json.loads(stream.readline()))) + "\n")

    def _signal(self, job: Job, number: signal.Signals) -> None:
        if job.process is not None:
            job.process.send_signal(number)

    def _forget(self, job: Job) -> None:
        for listener in job.sockets.values():
            listener.close()
        del self._jobs[job.target]

    def _find(self, target: str) -> Job:
        job = self._jobs.get(target)
        if job is None:
            domain, label = self._split(target)
            where = domain.replace("/", ": ").replace("gui", "user gui")
            said = f'Could not find service "{label}" in domain for {where}'
            raise Refusal(NO_SUCH_SERVICE, text=said)
        return job

    def _split(self, target: str) -> tuple[str, str]:
        kind, user, *label = target.split("/", 2)
        return f"{kind}/{user}", "".join(label)


@contextmanager
def launchd(folder: Path, environment: Mapping[str, str], **options: Any) -> Iterator[Launchd]:
    """The service manager, and no trace of it afterwards."""
    made = Launchd(folder, environment, **options)
    try:
        yield made
    finally:
        made.close()


def _listening(wanted: Mapping[str, str]) -> socket.socket:
    family = socket.AF_INET6 if wanted["SockFamily"] == "IPv6" else socket.AF_INET
    address = (wanted["SockNodeName"], int(wanted["SockServiceName"]))
    return socket.create_server(address, family=family, backlog=BACKLOG)

"""Compiled steps: asked for, waited for or not, kept on disk, and never the reason a step fails."""

import atexit
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Literal

from filelock import FileLock

from functional_optim.executors.cache_entry import BrokenEntryError
from functional_optim.executors.compile_request import Request
from functional_optim.executors.compiled_step import CompiledStep, load
from functional_optim.native.cache import TIMEOUT_VARIABLE, no_compiler
from functional_optim.native.private_folder import cache_folder

IDLE_SECONDS = 20.0
"""How long the compiling process is kept without work: a second compilation is then quicker."""

Status = Literal["absent", "compiling", "ready", "failed"]


class _Job:
    """One step that was asked for."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.status: Status = "absent"
        self.step: CompiledStep | None = None
        self.reason = ""
        self.unsaid: list[str] = []
        """Warnings for whoever asks next: in the background, nobody would know where they belong,
        and one that is an error would end the thread."""
        self.done = threading.Event()


class Compiler:
    """The compiled steps of this process, and the process that makes new ones."""

    def __init__(self) -> None:
        self.compilations = 0
        """How many times the compiler was run; steps found on disk do not count."""
        self._jobs: dict[Request, _Job] = {}
        self._lock = threading.Lock()
        self._queue: queue.Queue[_Job] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._of_parent: subprocess.Popen[str] | None = None
        self._warned: set[str] = set()
        atexit.register(self._stop)
        os.register_at_fork(after_in_child=self._begin_anew)

    def status(self, request: Request) -> tuple[Status, str]:
        """Where a request stands, and why it failed if it did."""
        job = self._jobs.get(request)
        return ("absent", "") if job is None else (job.status, job.reason)

    def step(self, request: Request, *, wait: bool) -> CompiledStep | None:
        """The compiled step: from memory, from disk, or compiled now.

        Args:
            request: what is wanted.
            wait: wait for the compiler; else it works in the background and None is returned.

        Returns:
            The step; None while it is not there, or if there will be none (a warning says why).
        """
        job = self._jobs.get(request)
        if job is None:
            job = self._begin(request)
        if wait:
            job.done.wait()
        while job.unsaid:
            self._warn(job.unsaid.pop())
        return job.step

    def wait(self, request: Request, timeout: float | None) -> bool:
        """Wait for a step that was asked for; True when nothing is left to wait for."""
        job = self._jobs.get(request)
        return job is None or job.done.wait(timeout)

    def idle(self) -> None:
        """Wait for everything that was asked for so far."""
        self._queue.join()

    def forget(self) -> None:
        """Drop what this process knows; the disk is then looked at again."""
        with self._lock:
            self._jobs.clear()
            self._warned.clear()

    def _begin(self, request: Request) -> _Job:
        with self._lock:
            if request in self._jobs:
                return self._jobs[request]
            job = self._jobs[request] = _Job(request)
            if self._from_disk(job) is None:
                return job
            if missing := no_compiler(request.device):
                self._finish(job, None, missing)
                return job
            job.status = "compiling"
            self._queue.put(job)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._serve, name="functional-optim compiler", daemon=True
                )
                self._thread.start()
        return job

    def _from_disk(self, job: _Job, warning: str = "") -> str | None:
        """None if the step is there; else what is wrong with what is on disk, empty if nothing."""
        request = job.request
        try:
            step = load(Path(request.folder), request)
        except BrokenEntryError as error:
            return str(error)
        if step is None:
            return ""
        if warning:
            job.unsaid.append(warning)
        self._finish(job, step, "")
        return None

    def _finish(self, job: _Job, step: CompiledStep | None, reason: str) -> None:
        job.step, job.reason = step, reason
        job.status = "failed" if step is None else "ready"
        if step is None:
            job.unsaid.append(
                f"steps are not compiled: {reason}. They run by the blocked executor, with the "
                "same results, at about a third of the speed"
            )
        job.done.set()

    def _warn(self, text: str) -> None:
        """Say something once in the life of this process."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _serve(self) -> None:
        """Work off the queue, one compilation at a time; end when there is none for a while."""
        while True:
            try:
                job = self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._queue.empty():
                        self._stop()
                        self._thread = None
                        return
                continue
            try:
                self._make(job)
            except Exception as error:  # noqa: BLE001  whatever it is, the step must still run
                self._finish(job, None, f"{type(error).__name__}: {error}")
            finally:
                self._queue.task_done()

    def _make(self, job: _Job) -> None:
        request = job.request
        folder = Path(request.folder)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Other processes, such as the ranks of one machine, want the same at the same time.
        with FileLock(folder / f"{request.key}.lock"):
            broken = self._from_disk(job)
            if broken is None:
                return
            self.compilations += 1
            error = self._ask(request)
            if error is not None:  # what a process that was killed has left there
                for left in folder.glob(f"{request.key}-*"):
                    shutil.rmtree(left, ignore_errors=True)
                self._finish(job, None, error)
                return
            warning = f"a compiled step on disk was broken, and was made anew: {broken}"
            missing = self._from_disk(job, warning if broken else "")
        if missing is not None:
            self._finish(job, None, missing or f"the compiler left nothing in {folder}")

    def _ask(self, request: Request) -> str | None:
        """Hand a request to the compiling process; returns what went wrong."""
        if self._process is None or self._process.poll() is not None:
            self._stop()
            self._process = _start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        seconds = float(os.environ.get(TIMEOUT_VARIABLE, "600"))
        timer = threading.Timer(seconds, _kill, [process])
        timer.start()
        try:
            process.stdin.write(request.to_json() + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError as error:
            self._stop()
            return f"the compiling process ended: {error}"
        finally:
            late = not timer.is_alive()
            timer.cancel()
        if answer:
            found: str | None = json.loads(answer)["error"]
            return found
        self._stop()
        if late:
            return f"the compiler took longer than {seconds:g} s ({TIMEOUT_VARIABLE})"
        return f"the compiling process ended with status {process.returncode}"

    def _stop(self) -> None:
        """End the compiling process, and the compiler that it may have started."""
        process, self._process = self._process, None
        if process is None:
            return
        _kill(process)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not flushed is not wanted
                    pipe.close()
        process.wait()

    def _begin_anew(self) -> None:
        """After a fork: threads are gone, and the compiling process is the parent's."""
        self._lock = threading.Lock()
        self._queue = queue.Queue()
        self._thread = None
        self._jobs = {key: job for key, job in self._jobs.items() if job.done.is_set()}
        self._of_parent, self._process = self._process, None
        if self._of_parent is not None:
            for pipe in (self._of_parent.stdin, self._of_parent.stdout):
                # Held open here, it would keep that process alive without its parent.
                if pipe is not None and not pipe.closed:
                    nothing = os.open(os.devnull, os.O_RDWR)
                    os.dup2(nothing, pipe.fileno())
                    os.close(nothing)


def _kill(process: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "functional_optim.executors.compile_worker", "5"]
    paths = [path for path in sys.path if path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
        process_group=0,
    )


__all__ = ["COMPILER", "Compiler", "cache_folder", "compilations"]

COMPILER = Compiler()


def compilations() -> int:
    """How many times this process has run the compiler."""
    return COMPILER.compilations

"""Requests to stop: at once where nothing is lost, else when the loop asks; a second one without ceremony."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import toys

from dflash_train import ranks, stop


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_at_once_where_nothing_would_be_lost(sent, code):
    before = signal.getsignal(sent)
    with pytest.raises(SystemExit) as ended, stop.listening():
        assert not stop.requested()
        send(sent)
    assert ended.value.code == code
    assert signal.getsignal(sent) is before and not stop.requested()


def test_ctrl_c_stays_a_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt), stop.listening():
        send(signal.SIGINT)


def test_a_deferred_request_waits_until_it_is_asked_for_or_the_end(capfd):
    done = []
    with pytest.raises(SystemExit) as ended, stop.listening():
        with stop.deferred():
            send(signal.SIGTERM)
            send(signal.SIGTERM)  # of a scheduler and of torchrun: one request
            done.append(stop.requested())
        done.append("never")
    assert done == [True] and ended.value.code == 143
    assert capfd.readouterr().err == "\nSIGTERM: stopping after this step; again to end at once\n"


def test_an_error_of_the_body_is_not_hidden_by_a_request():
    with pytest.raises(ZeroDivisionError), stop.listening(), stop.deferred():
        send(signal.SIGTERM)
        raise ZeroDivisionError


def test_work_that_can_be_done_again_is_cut_short_now_or_before_it_begins():
    done = []
    with pytest.raises(SystemExit), stop.listening(), stop.deferred():
        for _ in range(2):
            try:
                with stop.interruptible():
                    done.append("begun")
                    send(signal.SIGTERM)
                    done.append("not reached")
            except stop.Interrupted:
                done.append("cut")
        send(signal.SIGTERM)  # outside of such work it only waits
    assert done == ["begun", "cut", "cut"]


def test_outside_of_a_deferred_part_work_is_just_done():
    with stop.interruptible():
        pass
    with pytest.raises(SystemExit), stop.listening(), stop.interruptible():
        send(signal.SIGTERM)


def test_another_thread_cannot_listen_and_works_all_the_same():
    before, ran = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with stop.listening(), stop.deferred():
            ran.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]


def test_where_only_another_rank_was_asked_the_code_is_that_of_sigterm():
    with pytest.raises(SystemExit) as ended, stop.listening():
        stop.leave()
    assert ended.value.code == 143


def test_a_second_signal_ends_the_process():
    code = """
import time
from dflash_train import ranks, stop
stop.ONE_REQUEST = 0.2
with stop.listening(), stop.deferred():
    print("here", flush=True)
    while not stop.requested():
        time.sleep(0.01)
    time.sleep(0.5)
    print("here", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        for _ in range(2):
            assert process.stdout.readline() == "here\n"
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM


def _meeting() -> int | None:
    """Rank 1's exit code: it is asked to stop while it waits for rank 0, which comes only when it has heard."""
    pids = ranks.from_all_ranks(os.getpid())
    if ranks.is_rank0():
        time.sleep(0.5)
        os.kill(pids[1], signal.SIGTERM)
        assert ranks.read_note("stopped", 1, seconds=30) == "yes"
        ranks.meet()
        return None
    with pytest.raises(SystemExit) as ended, stop.listening():
        ranks.meet()
    ranks.leave_note("stopped", "yes")
    return ended.value.code


def test_a_rank_that_waits_for_another_hears_a_request_to_stop():
    assert toys.run_ranks(_meeting, 2, seconds=60) == [None, 143]

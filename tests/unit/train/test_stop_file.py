"""If this fails, a run whose signals end in a wrapper is killed at its time limit without a checkpoint."""

import signal
import time

from xgram_dist.train import signals
from xgram_dist.train.signals import ANSWER, ASKED, StopRequest


def test_a_file_asks_as_a_signal_does_and_gets_an_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "POLL_SECONDS", 0.01)
    file = tmp_path / "stop"
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequest(str(file)) as request:
        for text in (None, "", "sto"):  # not there yet; not asked; half written
            if text is not None:
                file.write_text(text)
            time.sleep(0.05)
            assert request.signal is None
        file.write_text(ASKED)
        end = time.monotonic() + 30
        while file.read_text() != ANSWER:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert request.signal == signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) == before

"""Checkpoints on an S3 server: complete or not there, found from an empty disk, whatever the server does."""

import os
import re
import shutil
import time

import pytest
from kills import Run, assert_same_end, steps_saved
from ranks_helper import run_ranks
from s3_helper import KEY, SECRET, serve_s3, serve_through_proxy
from test_chained_checkpoints import chained
from test_resume import outcome, run_until, settings
from train_helpers import read_metrics, small_config

from xgram_dist.checkpoint import remote
from xgram_dist.checkpoint.remote import LostPlaceError, RemoteCheckpoints, RemoteWriter
from xgram_dist.config import dump_config
from xgram_dist.data import storage
from xgram_dist.errors import UserError
from xgram_dist.train.trainer import Trainer


@pytest.fixture(scope="module")
def s3():
    yield from serve_s3()


@pytest.fixture
def proxy(s3, monkeypatch):
    monkeypatch.setattr(remote, "PIECE_BYTES", 100_000)
    yield from serve_through_proxy(s3, monkeypatch)


@pytest.fixture
def address(request):
    return "s3://bucket/" + re.sub("[^a-z0-9]+", "-", request.node.name)


def uploaded_to(config, address, **changes):
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"remote": address, **changes})})


def train(config, folder, **words):
    return Trainer(config, folder, fresh=False, **words).run()


def pieces(there: RemoteCheckpoints) -> set[str]:
    return set(there._names("pieces"))


def needed(there: RemoteCheckpoints) -> set[str]:
    return {one for step in there.steps() for one in there.index(step).objects()}


def test_a_run_on_an_empty_disk_goes_on_to_the_last_bit(proxy, address, data, tmp_path, monkeypatch):
    config = settings(data, optimizer="catch_up")
    assert train(config, tmp_path / "whole") == 0
    run = tmp_path / "one" / "run"
    run_until(uploaded_to(config, address), run, 8, monkeypatch)
    wait_for(lambda: bool(RemoteCheckpoints(address, "run").steps()))  # of step 3, and of 6 if there was time
    newest = RemoteCheckpoints(address, "run").steps()[-1]
    shutil.rmtree(tmp_path / "one")
    assert train(uploaded_to(config, address), run) == 0
    assert outcome(run)[0][8] == outcome(tmp_path / "whole")[0][8]
    assert [record["step"] for record in read_metrics(run, "train")] == list(range(newest + 1, 9))
    assert_same_end(run, tmp_path / "whole")


def wait_for(what, seconds=20.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def fetched_by_ranks(ranks, config, folder, environment):
    os.environ |= environment  # ranks are forked from a server that was started before
    trainer = Trainer(config, folder, fresh=False, ranks=ranks)
    trainer._close(failed=False)
    return trainer.start


def test_several_ranks_divide_what_they_fetch(proxy, address, data, tmp_path):
    config = uploaded_to(settings(data), address)
    assert train(config, tmp_path / "run") == 0
    shutil.rmtree(tmp_path / "run")
    proxy.gets.clear()
    credentials = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    assert run_ranks(fetched_by_ranks, 2, config, tmp_path / "run", credentials) == [8, 8]
    fetched = {path: count for path, count in proxy.gets.items() if "/pieces/" in path}
    assert len(fetched) > 5
    assert set(fetched.values()) == {1}


def test_a_chain_uploads_new_parts_alone_and_retention_keeps_what_others_need(proxy, address, data, tmp_path):
    assert train(uploaded_to(chained(data, keep=2), address), tmp_path / "run") == 0
    there = RemoteCheckpoints(address, "run")
    assert there.steps()[-1] == 8
    assert len(there.steps()) <= 2
    assert pieces(there) == needed(there)
    last = [record for record in read_metrics(tmp_path / "run", "upload") if record["uploaded"]][-1]
    rows = [name for name in there.index(last["step"]).files if name.startswith("rows-")]
    assert len(rows) > 1
    assert 0 < last["new_bytes"] < last["bytes"]
    assert all(count == 1 for path, count in proxy.puts.items() if "/pieces/" in path)


@pytest.mark.parametrize("faults", [["500", "500"], ["lost"], ["hang"]])
def test_an_upload_to_a_server_that_fails_for_a_while_is_tried_again(
    proxy, address, data, tmp_path, monkeypatch, faults
):
    monkeypatch.setattr(storage, "_READ_SECONDS", 0.5)
    proxy.spoil_put = lambda path, number: faults[number - 1] if number <= len(faults) else None
    assert train(uploaded_to(settings(data), address), tmp_path / "run") == 0
    there = RemoteCheckpoints(address, "run")
    assert there.steps()[-1] == 8
    assert pieces(there) == needed(there)


@pytest.mark.parametrize("where", ["/pieces/", "/step-"])
def test_a_server_that_stores_nothing_leaves_no_checkpoint_there_and_the_next_start_uploads(
    proxy, address, data, tmp_path, monkeypatch, capfd, where
):
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    config = uploaded_to(settings(data), address)
    proxy.spoil_put = lambda path, number: "lost" if where in path else None
    assert train(config, tmp_path / "run") == 1
    assert steps_saved(tmp_path / "run") == [6, 8]
    there = RemoteCheckpoints(address, "run")
    assert there.steps() == []
    shown = capfd.readouterr()
    assert "step 8: checkpoint NOT uploaded: cannot write 's3://bucket/" in shown.err
    assert "does not hold what it has confirmed" in shown.err
    assert not any(secret in shown.out + shown.err for secret in (KEY, SECRET))
    proxy.spoil_put = lambda path, number: None
    assert train(config, tmp_path / "run") == 0
    assert there.steps() == [8]
    assert pieces(there) == needed(there)


@pytest.mark.parametrize("kind", ["corrupt", "short", "404"])
def test_a_checkpoint_that_comes_damaged_is_not_taken_and_the_one_before_is(
    proxy, address, data, tmp_path, monkeypatch, capfd, kind
):
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    config = uploaded_to(settings(data), address)
    assert train(config, tmp_path / "run") == 0
    there = RemoteCheckpoints(address, "run")
    older, newest = there.steps()
    shutil.rmtree(tmp_path / "run")
    bad = (there.index(newest).objects() - there.index(older).objects()).pop()
    proxy.spoil = lambda path, number: kind if bad in path else None
    trainer = Trainer(config, tmp_path / "run", fresh=False)
    assert trainer.start == older
    trainer._close(failed=False)
    assert re.search(f"checkpoint of step {newest} is not taken from .*: cannot fetch ", capfd.readouterr().out)
    proxy.spoil = lambda path, number: kind if "/pieces/" in path else None
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(
        UserError, match=r"is not taken from .*; run the same command again, or start over with --fresh"
    ):
        Trainer(config, tmp_path / "run", fresh=False)


def test_a_server_that_lies_once_is_asked_again(proxy, address, data, tmp_path):
    config = uploaded_to(settings(data), address)
    assert train(config, tmp_path / "run") == 0
    shutil.rmtree(tmp_path / "run")
    kinds = ["corrupt", "short", "broken"]
    proxy.gets.clear()
    proxy.spoil = lambda path, number: kinds[hash(path) % 3] if number == 1 and "list-type" not in path else None
    trainer = Trainer(config, tmp_path / "run", fresh=False)
    assert trainer.start == 8
    trainer._close(failed=False)


def test_a_damaged_checkpoint_on_disk_is_replaced_by_the_one_on_s3(proxy, address, data, tmp_path):
    config = uploaded_to(settings(data), address)
    assert train(config, tmp_path / "run") == 0
    file = tmp_path / "run" / "checkpoints" / "step-00000008" / "rank-00000.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    file.write_bytes(damaged)
    trainer = Trainer(config, tmp_path / "run", fresh=False)
    assert trainer.start == 8
    trainer._close(failed=False)


def test_without_the_server_a_run_goes_on_from_its_disk_and_a_new_one_does_not_start(
    proxy, address, data, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(storage, "ATTEMPTS", 2)
    config = uploaded_to(settings(data), address)
    run_until(config, tmp_path / "run", 8, monkeypatch)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    assert train(config, tmp_path / "run") == 1  # trained, and not uploaded
    assert "the run goes on from its checkpoints on disk" in capfd.readouterr().out
    assert steps_saved(tmp_path / "run")[-1] == 8
    with pytest.raises(UserError, match=r"cannot list 's3://.* in 2 attempts"):
        Trainer(config, tmp_path / "other", fresh=False)


def test_an_older_start_that_still_runs_changes_nothing(proxy, address, data, tmp_path):
    config = uploaded_to(settings(data), address)
    assert train(config, tmp_path / "run") == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000008"
    older, newer = RemoteWriter(address, "run"), RemoteWriter(address, "run")
    older.take()
    newer.take()
    before = pieces(newer), newer.steps()
    for work in (lambda: older.upload(checkpoint), lambda: older.expire(1, 0, 8), older.clear):
        with pytest.raises(LostPlaceError):
            work()
    assert (pieces(newer), newer.steps()) == before
    newer.expire(1, 0, 8)
    assert newer.steps() == [8]
    assert pieces(newer) == needed(newer)


def test_an_older_start_that_still_runs_ends(proxy, address, data, tmp_path, monkeypatch, capfd):
    config = uploaded_to(settings(data), address)
    assert train(config, tmp_path / "run") == 0
    trainer = Trainer(config, tmp_path / "run", fresh=False)
    uploads = trainer.checkpoints._uploads
    uploads.results(wait=True)
    RemoteWriter(address, "run").take()
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    with pytest.raises(SystemExit):
        uploads._upload(8)
    assert "another start of this run writes to 's3://" in capfd.readouterr().err
    trainer._close(failed=False)


def test_fresh_clears_what_is_there(proxy, address, data, tmp_path):
    config = uploaded_to(settings(data), address)
    assert train(config, tmp_path / "run") == 0
    trainer = Trainer(config, tmp_path / "run", fresh=True)
    assert trainer.start == 0
    trainer._close(failed=False)
    there = RemoteCheckpoints(address, "run")
    assert there.steps() == []
    assert pieces(there) == set()


def test_credentials_in_the_address_are_refused(data, tmp_path):
    config = uploaded_to(settings(data), f"s3://{KEY}:{SECRET}@bucket/runs")
    with pytest.raises(UserError, match="must not hold credentials; set them in the environment") as caught:
        Trainer(config, tmp_path / "run", fresh=False)
    assert SECRET not in str(caught.value)


def test_kills_during_uploads_with_the_disk_lost_in_between_change_no_bit(tmp_path, data, zygote):
    """The remote is a folder here: what is sent to it takes the same way."""
    train = {"steps": 60, "log_every": 1, "validation_sequences": 4}
    recipe = tmp_path / "recipe.yaml"
    plain = small_config(data, train=train, checkpoint={"every": 5})
    recipe.write_text(dump_config(plain))
    whole = Run(str(recipe), tmp_path / "whole", zygote=zygote)
    assert whole.end() == 0, whole.said()
    recipe.write_text(dump_config(uploaded_to(plain, str(tmp_path / "remote"))))
    there, killed = RemoteCheckpoints(str(tmp_path / "remote"), "killed"), tmp_path / "killed"
    for number in range(3):
        run = Run(str(recipe), killed, zygote=zygote)
        newest = max(there.steps(), default=0)
        goal = newest + 5
        assert run.stop_at(
            lambda run, goal=goal: (
                max(steps_saved(killed), default=0) > goal and (killed / "checkpoints" / ".step-upload").exists()
            )
        ), run.said()
        run.kill("all ranks")
        assert run.end() != 0
        assert there.steps()[-1] >= newest
        if number != 1:
            shutil.rmtree(killed)
    run = Run(str(recipe), killed, zygote=zygote)
    assert run.end() == 0, run.said()
    assert "resuming after step" in run.said()
    assert_same_end(killed, tmp_path / "whole")
    assert pieces(there) == needed(there)

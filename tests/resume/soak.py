"""Kill runs again and again, everywhere, and compare their ends with those of runs that nothing happened to.

    python tests/resume/soak.py --kills 200              about an hour at most
    python tests/resume/soak.py --kills 20 --only disk   one phase

Each phase is a run (Slurm: several) that is killed as often as its share says, in its own way. The jobs on Slurm, which
wait most of the time, go on beside the other phases. A run that does not go on after a kill, or that ends otherwise
than the undisturbed one, ends the soak with an error.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("unit/train", "unit/data", "slurm")]

from block_disk import BlockDisk
from forked import Zygote
from kills import (
    CHAIN_MOMENTS,
    FETCH,
    MOMENTS,
    UPLOAD_MOMENTS,
    Kill,
    Killer,
    Run,
    assert_same_end,
    change_layout,
    last_saved,
    saving,
    training,
    wait_until,
)
from train_helpers import make_documents, read_metrics, small_config

from xgram_dist.cli.main import main
from xgram_dist.config import Config, dump_config
from xgram_dist.console import format_duration, print_table

STEPS_PER_KILL = 15
TOUCHED = {"optimizer": "catch_up", "rows": "touched"}
SLOW_BYTES = 1_000_000
"""A second, of the slow disk."""
DISK_BYTES = 24 << 20


@dataclass
class Soak:
    """What the phases share."""

    folder: Path
    seed: int
    shares: dict[str, int]
    """Kills, by phase."""
    begun: float = field(default_factory=time.monotonic)
    kills: list[tuple[str, float, Kill]] = field(default_factory=list)
    """(phase, seconds since the beginning, kill), as they came."""
    took: dict[str, float] = field(default_factory=dict)
    _undisturbed: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = prepare(self.folder)
        self.zygote = Zygote()
        self.steps = STEPS_PER_KILL * max(self.shares.values())

    def recipe(self, name: str, **sections: dict[str, object]) -> Config:
        sections["train"] = {"steps": self.steps, "validation_sequences": 4, **sections.get("train", {})}
        sections["checkpoint"] = {"every": 5, **sections.get("checkpoint", {})}
        config = small_config(self.data, **sections)
        self.path(name).write_text(dump_config(config))
        return config

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.yaml"

    def undisturbed(self, name: str, **sections: dict[str, object]) -> Path:
        """A run that nothing happens to; made once."""
        if name not in self._undisturbed:
            self.recipe(name, **sections)
            run = Run(str(self.path(name)), self.folder / f"{name}-undisturbed", zygote=self.zygote)
            assert run.end(1200) == 0, run.said()
            self._undisturbed[name] = run.folder
        return self._undisturbed[name]

    def touched_undisturbed(self) -> Path:
        """On the device, with rows that are kept once they were touched: the end of every tier and disk."""
        return self.undisturbed("touched", memory=TOUCHED)

    def tell(self, phase: str) -> Callable[[str], None]:
        def tell(text: str) -> None:
            told = sum(self.shares.values())
            number = 1 + len(self.kills)
            seconds = time.monotonic() - self.begun
            print(f"{format_duration(seconds)}: kill {number} of {told}, {phase}: {text}", flush=True)

        return tell

    def killer(self, phase: str, recipe: str, folder: Path, **more: object) -> Killer:
        return RecordingKiller(
            str(self.path(recipe)),
            folder,
            self.seed + len(self.took),
            self.zygote,
            tell=self.tell(phase),
            record=lambda kill: self.record(phase, kill),
            **more,  # type: ignore[arg-type]
        )

    def record(self, phase: str, kill: Kill) -> None:
        self.kills.append((phase, time.monotonic() - self.begun, kill))


@dataclass
class RecordingKiller(Killer):
    record: Callable[[Kill], None] = lambda kill: None

    def kill(self, run: Run, name: str, whom: str) -> Kill:
        kill = super().kill(run, name, whom)
        self.record(kill)
        return kill


def prepare(folder: Path) -> Path:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in make_documents(120))
    (folder / "raw.jsonl").write_text(lines, encoding="utf-8")
    words = ["--train-bpe", "300", "--chunk-tokens", "128", "--validation", "0.1", "--workers", "1"]
    assert main(["prepare", "--source", f"web={folder / 'raw.jsonl'}", *words, "--out", str(folder / "data")]) == 0
    return folder / "data"


def assert_same_records(folder: Path, other: Path) -> None:
    """Every step has one record, with the loss of the undisturbed run."""
    ours, theirs = ([(one["step"], one["loss"]) for one in read_metrics(run, "train")] for run in (folder, other))
    assert ours == theirs


# Phases. Each takes its kills; the runs end as the undisturbed one, bit for bit.


def all_rows(soak: Soak, kills: int) -> None:
    expected = soak.undisturbed("rows")
    kill_until_end(soak, "all rows", "rows", expected, kills, moments=MOMENTS)


def tier(placement: str) -> Callable[[Soak, int], None]:
    def phase(soak: Soak, kills: int) -> None:
        expected = soak.touched_undisturbed()
        memory = {**TOUCHED, "placement": placement}
        if placement == "disk":
            memory["folder"] = str(soak.folder / "scratch")
        soak.recipe(placement, memory=memory)
        kill_until_end(soak, placement, placement, expected, kills, moments=CHAIN_MOMENTS)
        assert not list((soak.folder / "scratch").glob("*.records"))

    return phase


def kill_until_end(soak: Soak, phase: str, recipe: str, expected: Path, kills: int, **more: object) -> None:
    killer = soak.killer(phase, recipe, soak.folder / f"{recipe}-killed", **more)
    for _ in range(kills):
        killer.start_and_kill()
    killer.finish()
    assert_same_end(killer.folder, expected)
    assert_same_records(killer.folder, expected)


def restarts(soak: Soak, kills: int) -> None:
    """One launcher that starts its ranks again each time."""
    expected = soak.touched_undisturbed()
    killer = soak.killer("restarts", "touched", soak.folder / "restarts-killed", moments=CHAIN_MOMENTS)
    run = Run(killer.recipe, killer.folder, "--restarts", str(kills), zygote=soak.zygote)
    for number in range(kills):
        name = list(CHAIN_MOMENTS)[number % len(CHAIN_MOMENTS)]
        goal = last_saved(killer.folder) + (5 if name != "during a load" else 0)
        if name == "during a load" and not goal:
            name = "during a save"
        moment = CHAIN_MOMENTS[name]
        assert run.stop_at(lambda run, goal=goal, moment=moment: last_saved(run.folder) >= goal and moment(run)), (
            run.said()
        )
        before, whom = run.pids(), ("the first", "the last")[number % 2]
        run.kill(whom)
        wait_until(run, lambda before=before: len(run.pids()) == 2 and not set(run.pids()) & set(before), 240)
        kill = Kill(name, whom, last_saved(killer.folder))
        killer.tell(f"{name}, {whom}; checkpoint of step {kill.saved}")
        soak.record("restarts", kill)
    assert run.end(600) == 0, run.said()
    assert_same_end(killer.folder, expected)
    assert_same_records(killer.folder, expected)


def layouts(soak: Soak, kills: int) -> None:
    """2, then 3, then 1 rank; the undisturbed run changes after the same steps."""
    third = soak.steps // 15 * 5
    train = {"steps": 3 * third, "global_batch": 6, "micro_batch": 1}
    soak.recipe("layouts", memory=TOUCHED, train=train, checkpoint={"keep_every": third})
    changes = [(2, third), (3, 2 * third), (1, 3 * third)]
    undisturbed = Killer(str(soak.path("layouts")), soak.folder / "layouts-undisturbed", soak.seed, soak.zygote)
    change_layout(undisturbed, changes, kills=0)
    killer = soak.killer("2-3-1 ranks", "layouts", soak.folder / "layouts-killed", moments=CHAIN_MOMENTS)
    change_layout(killer, changes, kills)
    assert_same_end(killer.folder, undisturbed.folder)
    assert_same_records(killer.folder, undisturbed.folder)


def uploads(soak: Soak, kills: int) -> None:
    """To an S3 server; after every third kill the disk of the run is lost, too."""
    import pytest
    from s3_helper import serve_s3, serve_through_proxy

    from xgram_dist.checkpoint.remote import RemoteCheckpoints

    expected = soak.touched_undisturbed()
    with pytest.MonkeyPatch.context() as patch:
        servers = serve_s3()
        proxies = serve_through_proxy(next(servers), patch)
        next(proxies)
        soak.recipe("uploads", memory=TOUCHED, checkpoint={"remote": "s3://bucket/soak"})
        killer = soak.killer("S3", "uploads", soak.folder / "uploads-killed", moments=UPLOAD_MOMENTS)
        killer.zygote = Zygote()  # with the server's address and credentials
        there = RemoteCheckpoints("s3://bucket/soak", killer.folder.name)
        for number in range(kills):
            is_lost = bool(killer.done) and not killer.folder.exists()
            kill = killer.start_and_kill(name=FETCH if is_lost else None)
            if number % 3 == 1 and there.steps():
                kill.whom += " and the disk"
                shutil.rmtree(killer.folder)
        killer.finish()
        assert_same_end(killer.folder, expected)
        shutil.rmtree(killer.folder)
        killer.finish()  # what was uploaded last is the end
        assert_same_end(killer.folder, expected)
        killer.zygote.close()
        for generator in (proxies, servers):
            next(generator, None)


def full_disk(soak: Soak, kills: int) -> None:
    """The disk is full for some saves before each kill, and at times during the next start, too."""
    expected = soak.touched_undisturbed()
    with BlockDisk(soak.folder / "full", DISK_BYTES) as disk:
        killer = soak.killer("full disk", "touched", disk.path / "run")
        for number in range(kills):
            run = killer.start()
            wait_until(run, lambda run=run: training(run) and "checkpoint of" in run.said(), 240)
            disk.fill()
            wait_until(run, lambda run=run: "checkpoint NOT written" in run.said(), 240)
            assert "No space left on device" in run.said()
            if number % 2:
                assert run.stop_at(lambda run: True)
                killer.kill(run, "while the disk is full", ("all ranks", "the last")[number // 2 % 2])
                disk.empty()
            else:
                newest = last_saved(killer.folder)
                disk.empty()
                assert run.stop_at(lambda run, newest=newest: last_saved(run.folder) > newest and saving(run))
                killer.kill(run, "during a save", ("the first", "the launcher")[number // 2 % 2])
        killer.finish()
        assert_same_end(killer.folder, expected)
        assert_same_records(killer.folder, expected)


def slow_disk(soak: Soak, kills: int) -> None:
    """A disk that writes and reads a megabyte a second."""
    expected = soak.touched_undisturbed()
    with BlockDisk(soak.folder / "slow", DISK_BYTES) as disk:
        killer = soak.killer("slow disk", "touched", disk.path / "run", moments=CHAIN_MOMENTS)
        with disk.throttle(SLOW_BYTES, soak.zygote.pid):
            for _ in range(kills):
                killer.start_and_kill()
        killer.finish()
        assert_same_end(killer.folder, expected)
        assert_same_records(killer.folder, expected)


def slurm(soak: Soak, kills: int) -> None:
    import soak_slurm

    soak_slurm.run(soak.folder / "slurm", soak.data, kills, soak.tell("Slurm"), lambda kill: soak.record("Slurm", kill))


PHASES: dict[str, tuple[float, Callable[[Soak, int], None]]] = {
    "all rows": (0.14, all_rows),
    "device": (0.09, tier("device")),
    "host": (0.12, tier("host")),
    "disk": (0.14, tier("disk")),
    "restarts": (0.06, restarts),
    "2-3-1 ranks": (0.12, layouts),
    "S3": (0.09, uploads),
    "full disk": (0.04, full_disk),
    "slow disk": (0.05, slow_disk),
    "Slurm": (0.15, slurm),
}
"""Share of the kills, and what makes them."""


def shares_of(kills: int, only: list[str]) -> dict[str, int]:
    """Whole numbers with this sum."""
    names = [name for name in PHASES if not only or name in only]
    whole, shares, given, before = sum(PHASES[name][0] for name in names), {}, 0.0, 0
    for name in names:
        given += PHASES[name][0] / whole * kills
        shares[name] = round(given) - before
        before = round(given)
    return {name: share for name, share in shares.items() if share}


def why_not(phase: str) -> str:
    """Why a phase cannot be on this machine; empty where it can."""
    if phase in ("full disk", "slow disk"):
        return BlockDisk.why_not()
    if phase == "Slurm":
        from cluster import missing

        return missing()
    return ""


def soak_all(folder: Path, kills: int, seed: int, only: list[str]) -> Soak:
    left_out = {name: reason for name in PHASES if (reason := why_not(name)) and (not only or name in only)}
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", flush=True)
    shares = shares_of(kills, [name for name in only or PHASES if name not in left_out])
    soak = Soak(folder, seed, shares)
    failed: list[str] = []

    def run(name: str) -> None:
        start = time.monotonic()
        try:
            PHASES[name][1](soak, shares[name])
        except BaseException:
            traceback.print_exc()
            failed.append(name)
        soak.took[name] = time.monotonic() - start
        print(f"{name}: {'FAILED' if name in failed else 'done'} in {format_duration(soak.took[name])}", flush=True)

    beside = threading.Thread(target=run, args=("Slurm",)) if "Slurm" in shares else None
    if beside is not None:
        beside.start()
    for name in shares:
        if name != "Slurm":
            run(name)
    if beside is not None:
        beside.join()
    soak.zygote.close()
    show(soak)
    if failed:
        sys.exit(f"FAILED: {', '.join(failed)}")
    done = format_duration(time.monotonic() - soak.begun)
    print(
        f"{len(soak.kills)} kills in {done}, 0 lost runs; weights, optimizer state and generators equal those of the "
        f"undisturbed runs bit for bit"
    )
    return soak


def show(soak: Soak) -> None:
    """What was hit when."""
    for title, of in (("killed", lambda kill: kill.moment), ("who", lambda kill: kill.whom)):
        found = Counter((of(kill), phase) for phase, _, kill in soak.kills)
        rows = sorted({of(kill) for _, _, kill in soak.kills})
        cells = [
            [row, *(str(found[row, phase] or "") for phase in soak.shares), str(sum(found[row, p] for p in PHASES))]
            for row in rows
        ]
        print_table([title, *soak.shares, "all"], cells)
        print()
    cells = [["minutes", *(f"{soak.took.get(phase, 0) / 60:.1f}" for phase in soak.shares), ""]]
    print_table(["", *soak.shares, ""], cells)
    print(flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], choices=PHASES, help="a phase; may be repeated")
    parser.add_argument("--list", metavar="FILE", help="write every kill with its time as a line of JSON")
    args = parser.parse_args()
    os.setpgrp()  # what is left of a failed phase is killed with this process's group
    with tempfile.TemporaryDirectory(prefix="xgram-soak-") as path:
        os.chmod(path, 0o755)
        soak = soak_all(Path(path), args.kills, args.seed, args.only)
        if args.list:
            lines = (json.dumps({"phase": p, "seconds": round(s, 1), **vars(kill)}) for p, s, kill in soak.kills)
            Path(args.list).write_text("\n".join(lines) + "\n", encoding="utf-8")

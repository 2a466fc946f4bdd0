"""`xgram-dist doctor`: a sound machine passes, and each check fails or warns on the fault it is for."""

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from xgram_dist.cli.main import main
from xgram_dist.cluster.doctor import file_system, machine, parity, step_watch, trial
from xgram_dist.cluster.doctor.report import CheckFailedError, Context, Row, gather, print_report, slow_ranks
from xgram_dist.cluster.doctor.run import CHECKS, run_doctor
from xgram_dist.cluster.interfaces import Interface
from xgram_dist.cluster.preflight import Links
from xgram_dist.parallel.mesh import single_mesh
from xgram_dist.parallel.process_group import ProcessGroup

GPU = torch.device("cuda", 0)
"""A name only: what judges figures of a GPU never touches one."""


class TwoRanks(ProcessGroup):
    """Rank 0 of two; what rank 1 would send is made from what rank 0 sends."""

    def __init__(self, other):
        super().__init__(0, 2)
        self.other = other

    def all_gather_object(self, value):
        return [value, self.other(value)]


def context(tmp_path, ranks=None, device="cpu", nodes=None, **more):
    return Context(
        ranks=ranks or ProcessGroup(),
        nodes=nodes or [f"n{1 + rank}" for rank in range(2)],
        device=torch.device(device),
        folder=tmp_path,
        quick=True,
        seconds=0.1,
        recipe=None,
        overrides=[],
        **more,
    )


def with_fact(change):
    """The other rank's fact is `change` of this one's, within `gather`."""
    return TwoRanks(lambda sent: (True, change(sent[1])) if isinstance(sent, tuple) else sent)


def only(rows, check):
    found = [row for row in rows if row.check == check]
    assert len(found) == 1, rows
    return found[0]


# The command


def test_a_sound_machine_passes_and_what_needs_a_gpu_is_skipped(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--quick", "--seconds", "0.1", "--out", "kept.json"]) == 0
    shown = capsys.readouterr()
    assert "doctor: 1 of 15, versions" in shown.err
    assert "0 warn, 0 fail" in shown.out
    kept = json.loads(Path("kept.json").read_text())
    assert (kept["complete"], kept["verdict"], kept["ranks"]) == (True, "pass", 1)
    rows = {row["check"]: row for row in kept["rows"]}
    skipped = ("device", "kernels against the CPU", "parity of other tables with the CPU", "host waits in a step")
    skipped += ("pageable copies in a step", "serial scatters in a compiled step", "NCCL interface", "host to device")
    for check in skipped:
        assert rows[check]["status"] == "skip"
        assert rows[check]["advice"]
    for check in ("versions", "atomic rename", "exclusive creation", "lease", "repetition bit for bit", "timed run"):
        assert rows[check]["status"] == "pass"
    assert rows["seconds by phase"]["figures"]["seconds"]["compute"] > 0
    assert os.listdir("runs") == []  # it cleans up


def test_a_failure_is_the_exit_code_and_the_other_checks_still_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("xgram_dist.cluster.doctor.run.CHECKS", {n: CHECKS[n] for n in ("file system", "versions")})
    assert main(["doctor", "--folder", "/proc/runs", "--out", str(tmp_path / "kept.json")]) == 1
    shown = capsys.readouterr().out
    assert "fail    run folder: cannot write '/proc/runs'" in shown
    assert "-> choose a folder that can be written to, with --folder" in shown
    assert "pass    versions" in shown
    assert json.loads((tmp_path / "kept.json").read_text())["verdict"] == "fail"


def test_the_branches_for_a_gpu_run(tmp_path, monkeypatch):
    """On the CPU, as far as it goes: no line of the doctor is to be run for the first time on a GPU."""
    monkeypatch.setattr(Context, "on_gpu", True)
    monkeypatch.setattr(machine, "COPY_BYTES", {"gpu": 1 << 20})
    monkeypatch.setattr(machine, "MATMUL_SIZE", {"gpu": 64})
    monkeypatch.setattr(trial, "SMALL_BACKBONE", {**trial.CPU_BACKBONE, "sequence_length": 32})
    monkeypatch.setattr(trial, "GPU_CHOICES", ({"micro_batch": 1, "compile": False},))
    monkeypatch.setattr(file_system, "REPLACEMENTS", 3)
    monkeypatch.setattr("xgram_dist.train.profiling.peak_flops", lambda _: 1e12)
    monkeypatch.setattr(parity, "parity_cases", lambda _: [parity.Case("replicated", "bf16", False)])
    given = context(tmp_path, nodes=["n1"])
    out = tmp_path / "kept.json"
    run_doctor(given, out)
    rows = {row["check"]: row for row in json.loads(out.read_text())["rows"]}
    failed = {name for name, row in rows.items() if row["status"] == "fail"}
    assert failed == set()
    assert {name for name, row in rows.items() if row["status"] == "skip"} == {
        "clock skew", "links between ranks", "shared folder", "share of the exchange",
        "parity of other tables with the CPU",
        "host waits in a step (replicated, fp32, hashed tables)",  # a CPU has none to see
        "pageable copies in a step (replicated, fp32, hashed tables)",
    }  # fmt: skip
    assert set(given.measured) == {"memory_bandwidth", "host_bandwidth"}
    assert rows["MFU"]["figures"]["utilisation"] > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "0"], "--ranks 0 is not at least 1"),
        (["--seconds", "-1"], "--seconds -1 is not above 0"),
        (["train.micro_batch=2"], "'train.micro_batch=2' changes a recipe, and none is given; name it with --recipe"),
    ],
)
def test_mistakes_are_one_sentence(words, sentence, capsys):
    assert main(["doctor", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_check_that_raises_on_one_rank_is_a_failed_row_on_all(tmp_path):
    everyone = context(tmp_path, TwoRanks(lambda sent: (False, "OSError: gone")))
    with pytest.raises(CheckFailedError, match=r"OSError: gone \(rank 1 on n2\)"):
        gather(everyone, lambda: 1)
    out = tmp_path / "kept.json"
    assert not run_doctor(everyone, out, {"broken": lambda given: [Row("a", "pass", str(gather(given, lambda: 1)))]})
    assert json.loads(out.read_text())["rows"][0]["found"] == "OSError: gone (rank 1 on n2)"


def test_a_crash_in_one_process_is_a_failed_row(tmp_path, capsys):
    def crash(_):
        raise RuntimeError("no kernel image\nfor this device")

    assert not run_doctor(context(tmp_path), None, {"kernels": crash})
    shown = capsys.readouterr()
    assert "fail    kernels: no kernel image\n" in shown.out
    assert "Traceback" in shown.err


def test_the_worst_rows_come_last(capsys):
    print_report([Row("a", "fail", "bad", "mend it"), Row("b", "pass", "good"), Row("c", "warn", "so so", "look")])
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert lines == ["pass", "warn", "->", "fail", "->", "1"]


# Versions, process, device


def test_ranks_with_other_versions_fail(tmp_path):
    rows = machine.check_versions(context(tmp_path, with_fact(lambda fact: {**fact, "numpy": "1.0"})))
    row = only(rows, "versions")
    assert row.status == "fail"
    assert "rank 1 on n2 has numpy 1.0" in row.found


def test_another_torch_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "TESTED_TORCH", "9.9")
    assert only(machine.check_versions(context(tmp_path)), "torch").status == "warn"


def test_few_cores_beside_a_gpu_and_few_open_files_are_warnings(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (256, 256))
    rows = machine.check_process(context(tmp_path, device=GPU))
    assert only(rows, "CPU cores").status == only(rows, "open files").status == "warn"
    assert only(machine.check_process(context(tmp_path)), "CPU cores").status == "pass"


def test_a_gpu_that_torch_does_not_use_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "unused_gpu", lambda: "this torch is built without CUDA")
    row = only(machine.check_device(context(tmp_path)), "device")
    assert row.status == "fail"
    assert "built without CUDA" in row.found


@pytest.mark.parametrize(
    ("free", "other", "status"), [(79e9, "H100", "pass"), (40e9, "H100", "warn"), (79e9, "A100", "warn")]
)
def test_a_gpu_in_use_and_a_mix_of_gpus_are_warnings(tmp_path, monkeypatch, free, other, status):
    monkeypatch.setattr(machine, "device_name", lambda _: "H100")
    monkeypatch.setattr(machine, "free_and_total_memory", lambda _: (free, 80e9))
    ranks = with_fact(lambda fact: (other, *fact[1:]))
    assert only(machine.check_device(context(tmp_path, ranks, GPU)), "device").status == status


def test_an_absent_compiler_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda _: None)
    assert machine.check_compiler(context(tmp_path))[0].status == "warn"


# Clocks and network


@pytest.mark.parametrize(("skew", "status"), [(0.0, "pass"), (5.0, "warn"), (-90.0, "fail")])
def test_a_lying_clock_is_named(tmp_path, skew, status):
    ranks = TwoRanks(lambda sent: sent and (sent[0] + skew, sent[1] + skew))
    row = only(machine.check_clocks(context(tmp_path, ranks)), "clock skew")
    assert row.status == status
    offset, uncertainty = row.figures["seconds"][1], row.figures["uncertainty"][1]
    assert abs(offset - skew) <= uncertainty + 1e-6


def test_a_slow_message_does_not_look_like_a_skew(tmp_path):
    """Bounds of an offset are only as good as the fastest round."""
    ranks = TwoRanks(lambda sent: sent and (sent[0] - 40.0, sent[1] + 40.0))
    assert only(machine.check_clocks(context(tmp_path, ranks)), "clock skew").status == "pass"


@pytest.mark.parametrize(
    ("other", "status"),
    [
        (Interface("eth0", "10.0.0.2", "10.0.0.0/24"), "pass"),
        (Interface("eth0", "10.0.1.2", "10.0.1.0/24"), "warn"),
        (Interface("docker0", "172.17.0.1", "172.17.0.0/16"), "warn"),
    ],
)
def test_ranks_on_two_interfaces_or_networks_are_a_warning(tmp_path, monkeypatch, other, status):
    monkeypatch.setattr(machine, "gloo_interface", lambda: Interface("eth0", "10.0.0.1", "10.0.0.0/24"))
    rows = machine.check_interfaces(context(tmp_path, with_fact(lambda _: other)))
    assert only(rows, "gloo interface").status == status


def test_nccl_on_two_interfaces_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "nccl_interfaces", lambda: ["ib0"])
    ranks = with_fact(lambda fact: ["eth0"] if isinstance(fact, list) else fact)
    assert only(machine.check_interfaces(context(tmp_path, ranks, GPU)), "NCCL interface").status == "warn"


def test_links_below_the_plan_and_slow_nodes_are_warnings(tmp_path, monkeypatch):
    links = Links(all_to_all=10.0, all_reduce=45.0, nodes={"n1": 40.0, "n2": 39.0, "n3": 4.0})
    monkeypatch.setattr(machine, "measure_links", lambda *_: links)
    monkeypatch.setattr(machine, "_latency", lambda _: 1e-3)
    given = context(tmp_path, TwoRanks(lambda sent: sent), GPU)
    rows = machine.check_links(given)
    assert [only(rows, check).status for check in ("links between ranks", "slow nodes")] == ["warn", "warn"]
    assert "n3 4 GB/s" in only(rows, "slow nodes").found
    assert given.measured == {"bandwidth": 10.0}


def test_a_slow_rank_is_named():
    assert slow_ranks([2000.0, 2010.0, 900.0]) == [2]


# File system


def test_a_rename_that_is_not_atomic_fails(tmp_path):
    def copy(source, target):
        target.unlink()
        time.sleep(0.002)
        target.write_bytes(source.read_bytes())

    row = only(file_system.check_file_system(context(tmp_path), copy), "atomic rename")
    assert row.status == "fail"
    assert row.figures["broken"] > 0
    assert os.listdir(tmp_path) == []


def test_a_folder_that_another_node_does_not_see_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(file_system, "_wait_for", lambda _: 0.0)
    ranks = TwoRanks(lambda sent: (True, None) if isinstance(sent, tuple) else sent)
    (row,) = file_system.check_file_system(context(tmp_path, ranks))
    assert (row.check, row.status) == ("shared folder", "fail")
    assert "rank 1 on n2 does not see a file that rank 0 wrote" in row.found


def test_a_file_seen_late_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(file_system, "_wait_for", lambda _: 20.0)
    folder = tmp_path / "one"
    folder.mkdir()
    assert file_system._visibility(context(tmp_path, TwoRanks(lambda sent: sent)), folder).status == "warn"


def test_two_winners_of_one_exclusive_file_fail(tmp_path):
    """The other rank says that it won all files too."""
    row = file_system._exclusive_creation(context(tmp_path, TwoRanks(lambda sent: sent)), tmp_path)
    assert row.status == "fail"
    assert "20 winners for 10 files" in row.found


def test_a_lease_that_is_not_seen_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(file_system, "check_free", lambda _: None)
    assert file_system._lease(context(tmp_path), tmp_path).status == "fail"


def test_slow_writes_a_full_disk_and_a_strange_clock_are_warnings(tmp_path, monkeypatch):
    for limit, value in {"SLOW_FSYNC_SECONDS": 0, "SLOW_WRITE": math.inf, "FREE_BYTES": math.inf}.items():
        monkeypatch.setattr(file_system, limit, value)
    monkeypatch.setattr(file_system, "CLOCK_SECONDS", -1)
    monkeypatch.setattr(file_system, "REPLACEMENTS", 3)
    rows = file_system.check_file_system(context(tmp_path))
    checks = ("fsync", "checkpoint writes", "run folder", "clock of the file system")
    assert [only(rows, check).status for check in checks] == ["warn"] * 4


# Parity and the timed run


def test_losses_outside_the_tolerance_fail_from_the_step_where_they_leave_it():
    reference = [(6.0 - 0.1 * step, 1.0) for step in range(20)]
    assert compare([(a * (1 + 5e-5), b) for a, b in reference], reference).status == "pass"
    off = [(a * (1 + 2e-4) if step >= 7 else a, b) for step, (a, b) in enumerate(reference)]
    row = compare(off, reference)
    assert row.status == "fail"
    assert "from step 8" in row.found
    assert compare(off, reference, "bf16").status == "pass"
    norms = [(a, b * 1.5) for a, b in reference]
    assert compare(norms, reference).status == "fail"
    assert compare([(math.nan, b) for _, b in reference], reference).status == "fail"


def compare(found, reference, precision="fp32"):
    return parity.compare_losses("replicated", found, reference, parity.TOLERANCE[precision])


def test_training_on_other_tokens_fails_parity(monkeypatch):
    case = parity.Case("replicated", "fp32", False)
    config, mesh = parity.small_config(case, 1), single_mesh(ProcessGroup())
    reference = parity.train_small(config, mesh, torch.device("cpu"), 3)
    whole = parity.TrainedModel.batch
    monkeypatch.setattr(parity.TrainedModel, "batch", lambda self, step: whole(self, step + (step == 3)))
    row = compare(parity.train_small(config, mesh, torch.device("cpu"), 3), reference)
    assert row.status == "fail"
    assert "from step 3" in row.found


def test_runs_that_differ_in_a_bit_fail():
    run = [(1.0, 2.0), (0.5, 1.0)]
    assert parity.compare_repeated(run, list(run)).status == "pass"
    row = parity.compare_repeated(run, [(1.0, 2.0), (math.nextafter(0.5, 1), 1.0)])
    assert row.status == "fail"
    assert "differ from step 2" in row.found


def test_kernels_agree_with_themselves_and_a_wrong_one_fails():
    rows = parity.compare_kernels(torch.device("cpu"))
    assert {row.status for row in rows} == {"pass"}, rows
    assert len(rows) == 2 * len(parity.KERNELS)
    calls = iter(range(100))

    def wrong(device, dtype):  # right for the reference, off by a thousandth afterwards
        return [tensor * (1 + 1e-3 * min(1, next(calls))) for tensor in parity.KERNELS["attention"](device, dtype)[:1]]

    fp32, bf16 = parity.compare_kernels(torch.device("cpu"), {"attention": wrong})
    assert (fp32.status, bf16.status) == ("fail", "pass")


CLIP, EXCHANGE = ("optim/clip.py", "clip_by_joint_norm"), ("tables/exchange_messages.py", "add_gradients")


def waits_row(waits, *case, **keys):
    return step_watch.waits_row("small", parity.small_config(parity.Case(*case, **keys), 1), waits)


def test_more_host_waits_than_meant_are_a_warning_that_names_them():
    assert waits_row([CLIP], "replicated", "fp32", False).status == "pass"
    row = waits_row([CLIP, CLIP, EXCHANGE], "replicated", "fp32", False)
    assert row.status == "warn"
    assert (
        row.found == "optim/clip.py clip_by_joint_norm, 1 a step; tables/exchange_messages.py add_gradients, 1 a step"
    )


def test_waits_that_a_placement_or_an_engine_needs_are_allowed():
    assert waits_row([CLIP, EXCHANGE], "replicated", "fp32", False, tables="rows in host memory").status == "pass"
    config = parity.small_config(parity.Case("deepspeed", "bf16", False), 1)
    stage_2 = config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero_stage": 2})})
    waits = [CLIP, ("deepspeed/accelerator/cuda_accelerator.py", "synchronize")]
    assert step_watch.unexpected_waits(stage_2, waits) == []
    assert step_watch.unexpected_waits(config, waits) != []


def test_pageable_copies_and_serial_scatters_are_warnings():
    sound = ["Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "triton_poi_fused_add_0", "EmbeddingBag_updateOutput"]
    assert step_watch.copies_row("small", sound).status == step_watch.scatter_row(sound).status == "pass"
    row = step_watch.copies_row("small", [*sound, "Memcpy HtoD (Pageable -> Device)"])
    assert (row.status, row.found) == ("warn", "1 x Memcpy HtoD (Pageable -> Device)")
    row = step_watch.scatter_row([*sound, "void at::native::indexing_backward_kernel<float, 4>(long const*)"])
    assert row.status == "warn"


def test_seeing_nothing_is_not_a_pass():
    assert waits_row([], "replicated", "fp32", False).status == "skip"
    assert step_watch.copies_row("small", []).status == step_watch.scatter_row([]).status == "skip"


def test_other_tables_agree_with_the_cpu_and_a_wrong_one_fails(tmp_path, monkeypatch):
    """On the CPU as if it were a GPU: the same numbers."""
    monkeypatch.setattr(Context, "on_gpu", True)
    given = replace(context(tmp_path), quick=False)
    rows = parity.check_variants(given)
    assert [row.status for row in rows] == ["pass"] * (len(parity.VARIANTS) - 1), rows
    device = iter(range(100))
    train = parity.train_small
    wrong = [(1.0, 1.0)] * parity.VARIANT_STEPS
    monkeypatch.setattr(parity, "train_small", lambda *a: wrong if next(device) % 2 else train(*a))
    assert {row.status for row in parity.check_variants(given)} == {"fail"}


def figures(**changed):
    phases = {"fetch": 0.01, "wait": 0.02, "compute": 0.9, "return": 0.03, "update": 0.04}
    return {
        "steps": 5,
        "step_seconds": 1.0,
        "phases": phases | changed.pop("phases", {}),
        "tokens_per_second": 400_000.0,
        "loss": 8.0,
        "finite": True,
        "peak_memory": 1e9,
        **changed,
    }


@pytest.fixture
def h100(monkeypatch):
    """Two ranks that say they are H100s, and the recipe they would time."""
    for module in (trial, trial.Utilization.__init__.__globals__):
        if isinstance(module, dict):
            monkeypatch.setitem(module, "peak_flops", lambda _: 989e12)
        else:
            monkeypatch.setattr(module, "peak_flops", lambda _: 989e12)
    monkeypatch.setattr(trial, "free_and_total_memory", lambda _: (79e9, 80e9))


def judged(tmp_path, other=lambda one: one, **changed):
    given = context(tmp_path, with_fact(other), GPU, nodes=["n1", "n1"])
    return trial.judge_trial(
        given, trial.trial_config(replace(given, ranks=with_fact(lambda fact: fact))), figures(**changed)
    )


def test_a_timed_run_tells_mfu_by_phase_and_the_share_of_the_exchange(tmp_path, h100):
    rows = judged(tmp_path)
    assert only(rows, "share of the exchange").figures["share"] == pytest.approx(0.06)
    mfu = only(rows, "MFU")
    assert mfu.figures["compute_utilisation"] == pytest.approx(mfu.figures["utilisation"] / 0.9)
    assert "compute 90 %" in only(rows, "seconds by phase").found
    assert only(rows, "slow ranks").status == "pass"


def test_the_faults_of_a_timed_run_are_named(tmp_path, h100):
    slow = {"phases": {"fetch": 0.3}, "step_seconds": 30.0, "peak_memory": 200e9}
    rows = judged(tmp_path, **(slow | {"phases": {"fetch": 9.0}}))
    for check in ("share of the exchange", "step time against the plan", "memory against the plan"):
        assert only(rows, check).status == "warn", check
    rows = judged(tmp_path, lambda one: one if not isinstance(one, dict) else {**one, "finite": False})
    assert only(rows, "timed run").status == "fail"
    assert "rank 1 on n1" in only(rows, "timed run").found

    def lame(one):
        return {**one, "phases": {**one["phases"], "compute": 1.5}} if isinstance(one, dict) else one

    assert only(judged(tmp_path, lame), "slow ranks").status == "warn"


def test_the_timed_model_is_the_largest_that_fits(tmp_path, h100, monkeypatch):
    def chosen(free):
        monkeypatch.setattr(trial, "free_and_total_memory", lambda _: (free, 80e9))
        train = trial.trial_config(context(tmp_path, with_fact(lambda fact: fact), GPU)).train
        return train.micro_batch, train.activation_checkpointing

    assert chosen(200e9) == (4, False)
    assert chosen(1e9) == (1, True)
    sizes = [chosen(free) for free in (30e9, 45e9, 60e9, 80e9)]
    assert sizes == sorted(sizes, key=lambda found: (found[0], not found[1]))


def test_a_recipe_that_is_not_there_is_refused_before_anything_is_measured(tmp_path, capsys):
    from xgram_dist.cli.main import main

    assert main(["doctor", "--recipe", str(tmp_path / "none.yaml"), "--out", str(tmp_path / "out.json")]) == 2
    assert "none.yaml" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()

"""The sbatch scripts of a run: readable text with every value quoted.

What a user typed (names, folders, options) reaches the shell only through `shlex.quote`, whose quoting Slurm also
understands in `#SBATCH` lines. Only `setup` of the site file is shell code.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from xgram_dist.cluster.slurm.site import Site
from xgram_dist.errors import UserError

SAVE_SHARE = 0.8
"""Of the site's save_seconds: after that, the job requeues even without a checkpoint."""


@dataclass(frozen=True)
class Script:
    """Everything that goes into a script."""

    name: str
    folders: tuple[Path, ...]
    """Run folders; several make a job array with a task for each."""
    nodes: str
    """N, or MIN-MAX."""
    counts: tuple[int, ...]
    """The node counts of that range over which the batch divides."""
    site: Site
    directory: Path
    """Working directory of the job."""
    python: str
    preflight: bool = True
    at_once: int | None = None
    """Tasks of the array that may run at the same time; None: all."""


def _check_folders(folders: tuple[Path, ...]) -> None:
    for folder in folders:
        if ":" in str(folder):  # the job runs the copy of the code in the folder
            raise UserError(f"run folder '{folder}': PYTHONPATH cannot hold a colon; choose another with --folder")


def train_script(script: Script) -> str:
    _check_folders(script.folders)
    site, array = script.site, len(script.folders) > 1
    runs = [quote(str(folder)) for folder in script.folders]
    log = f"{script.folders[0].parent}/%a/slurm/log.txt" if array else f"{script.folders[0]}/slurm/log.txt"
    command = [" ".join(map(quote, (*site.container, script.python))) + " -m xgram_dist train"]
    command += ['"$RUN/slurm/config.yaml"', '--folder "$RUN"']
    command += [f"--preflight {site.bandwidth:g}"] if script.preflight else []
    job = [
        '--folder "$RUN"',
        f"--ranks {site.ranks}",
        f"--counts {','.join(map(str, script.counts))}",
        f"--launcher {site.launcher}",
    ]
    job += [f"--restarts {site.restarts}", f"--restart-wait {site.restart_wait:g}"]
    job += [f"--save-seconds {SAVE_SHARE * site.save_seconds:g}", f"--time {quote(site.time)}"]
    job += [f"--script {quote(str(script.folders[0] / 'slurm' / 'job.sbatch'))}"]
    job += [f"--exclude={quote(site.excluded)}"] if site.excluded else []
    job += [f"--node-suffix={quote(site.node_suffix)}"] if site.node_suffix else []
    job += [f"--srun={quote(option)}" for option in site.srun]
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by `xgram-dist submit`. Run `sbatch` on it again to resume the run.",
            *_directive("array", _tasks(len(runs), script.at_once) if array else None),
            *_directive("requeue"),
            *_directive("signal", f"B:USR1@{site.save_seconds}"),
            *_options(script, script.nodes, site.ranks, site.gpus_per_node, log),
            "set -euo pipefail",
            "",
            *_environment(site),
            *([f"RUNS=({' '.join(runs)})", "RUN=${RUNS[$SLURM_ARRAY_TASK_ID]}"] if array else [f"RUN={runs[0]}"]),
            'export PYTHONPATH="$RUN/slurm/code"',
            "",
            "# Starts the ranks. Requeues the job if they stopped or crashed; ends with 0 when training is complete.",
            _continued(
                [
                    f"exec {_host_python(script)} -m xgram_dist.cluster.slurm.job",
                    " ".join(job),
                    "-- " + " ".join(command),
                ]
            ),
            "",
        ]
    )


def eval_script(script: Script, tasks: tuple[str, ...], data: Path | None) -> str:
    """Evaluates the run's newest checkpoint on one GPU, on all documents of the tasks."""
    site, run = script.site, script.folders[0]
    command = " ".join([*map(quote, (*site.container, script.python)), "-m xgram_dist eval"])
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by `xgram-dist submit --then eval`.",
            *_options(script, "1", 1, min(1, site.gpus_per_node), f"{run}/slurm/eval.txt", "-eval"),
            *_directive("requeue"),
            "set -euo pipefail",
            "",
            *_environment(site),
            f"RUN={quote(str(run))}",
            'export PYTHONPATH="$RUN/slurm/code"',
            "",
            f'exec {command} "$RUN" --tasks {quote(",".join(tasks))}' + (f" --data {quote(str(data))}" if data else ""),
            "",
        ]
    )


def quote(word: str) -> str:
    """For the shell. Control characters, which no line of a script can hold, are refused."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in word):
        raise UserError(f"{word!r} contains a control character, which a job script cannot hold; choose another name")
    return shlex.quote(word)


def _options(script: Script, nodes: str, ranks: int, gpus: int, log: str, suffix: str = "") -> list[str]:
    site = script.site
    kind = f"gpu:{site.gpu_type}" if site.gpu_type else "gpu"
    return [
        *_directive("job-name", script.name + suffix),
        *_directive("partition", site.partition),
        *_directive("account", site.account),
        *_directive("qos", site.qos),
        *_directive("nodes", nodes),
        *_directive("cpus-per-task", _cpus(site, ranks)),
        *_directive("gres", f"{kind}:{gpus}" if gpus else None),
        *_directive("mem", site.memory_per_node),
        *_directive("time", site.time),
        *_directive("chdir", str(script.directory)),
        *_directive("output", _log_pattern(log)),
        *_directive("open-mode", "append"),
        *(f"#SBATCH {quote(option)}" for option in site.sbatch),
    ]


def _tasks(count: int, at_once: int | None) -> str:
    return f"0-{count - 1}" + (f"%{at_once}" if at_once is not None else "")


def _cpus(site: Site, ranks: int) -> str | None:
    """Of a node. One Slurm task for all its ranks: a job with more tasks could not restart on fewer nodes. None:
    --exclusive gives the job all CPUs, which `cluster.slurm.job` divides."""
    if site.cpus_per_node is not None:
        return str(site.cpus_per_node // site.ranks * ranks)
    return None if site.gpus_per_node and site.exclusive else str(ranks)


def _directive(option: str, value: str | None = "") -> list[str]:
    """A `#SBATCH` line; none if the value is None."""
    if value is None:
        return []
    return [f"#SBATCH --{option}" + (f"={quote(value)}" if value else "")]


def _log_pattern(path: str) -> str:
    """Slurm expands % patterns and backslashes in the name of a log, so a folder with either is refused."""
    if "\\" in path or "%" in path.replace("/%a/slurm/", "/"):
        raise UserError(
            f"the run folder '{path}' contains a '%' or a backslash, which Slurm expands in the name of a log; choose "
            f"another with --folder"
        )
    return path


def _environment(site: Site) -> list[str]:
    variables = dict(site.environment)
    if site.interface is not None:
        variables |= {"NCCL_SOCKET_IFNAME": site.interface, "GLOO_SOCKET_IFNAME": site.interface}
    return [
        *([f"module load {' '.join(map(quote, site.modules))}"] if site.modules else []),
        *site.setup,
        *(f"export {name}={quote(value)}" for name, value in variables.items()),
    ]


def _host_python(script: Script) -> str:
    """The job's first process runs outside the container, where Slurm's commands are."""
    return "python3" if script.site.container else quote(script.python)


def _continued(words: list[str]) -> str:
    return " \\\n    ".join(words)

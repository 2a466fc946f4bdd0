"""The pipeline of `xgram-dist prepare`: sources of documents to a prepared data set.

In: a `Request`. Out: `OUT/{train,validation}/<source>/` with MDS shards and `index.json`, the tokenizer,
`counts.npz` (the token counts of the written train chunks) and, last of all, `dataset.json`.

1. The input files are split into work units (`shards.plan_units`).
2. Worker processes tokenize the units into shards under `OUT/.staging` (`workers`, `shards`). Finished units are kept
   when the command is interrupted and run again.
3. The units are merged into the data set (`merge`).

The result depends on documents and settings alone, not on the number of workers or on interruptions.
"""

import fcntl
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from xgram_dist.console import Progress
from xgram_dist.data import corpus
from xgram_dist.data.documents import Document, estimated_text_bytes, find_files, read_documents
from xgram_dist.data.engines import AUTO, CHOICES, HUGGINGFACE, EngineChoice, choose_engine, first_documents
from xgram_dist.data.manifest import MANIFEST, SOURCE_NAME, SPLITS, Manifest, digest, read_manifest
from xgram_dist.data.merge import merge_units
from xgram_dist.data.shards import KEPT_REJECTIONS, Settings, WorkUnit, plan_units, unit_folder
from xgram_dist.data.tokenizer import Tokenizer, load_tokenizer
from xgram_dist.data.train_bpe import train_bpe
from xgram_dist.data.workers import disk_error, run_units, start_fork_server
from xgram_dist.errors import UserError
from xgram_dist.files import write_atomically

STAGING = ".staging"
BPE_TRAINING_BYTES = 64_000_000  # of text; more hardly changes the merges
_EARLY_LINES = 10_000  # lines after which the share of rejected lines is checked during the run
_PIPELINE_VERSION = 1  # part of the request key; raise it when the same input gives another output


@dataclass(frozen=True)
class Source:
    name: str
    path: Path
    weight: float | None = None


@dataclass(frozen=True)
class Request:
    out: Path
    workers: int
    sources: tuple[Source, ...] = ()  # empty: the embedded corpus
    tokenizer: Path | None = None
    train_bpe: int | None = None
    end_of_text: str | None = None
    chunk_tokens: int = 40_960
    sequence_length: int | None = None  # pack whole documents into sequences of this length
    validation: float = 0.005
    max_rejected: float = 0.01
    corpus_bytes: int = corpus.DEFAULT_BYTES
    overwrite: bool = False
    engine: str = AUTO  # of the tokenizer; the result does not depend on it


@dataclass(frozen=True)
class Outcome:
    manifest: Manifest
    seconds: float
    engine: EngineChoice | None = None
    already_there: bool = False
    units: int = 0
    units_kept: int = 0  # finished by an interrupted run
    new_tokens: int = 0
    first_rejections: list[str] = field(default_factory=list)
    dropped_tokens: int = 0
    worker_bytes: int = 0  # the most memory a worker held
    cpu_seconds: float = 0.0  # of all workers


@dataclass(frozen=True)
class PartOutcome:
    seconds: float
    units: int  # of this part
    units_kept: int = 0
    new_tokens: int = 0


def prepare(request: Request) -> Outcome:
    """Run the pipeline; a rerun resumes an interrupted run."""
    started = time.monotonic()
    stamps, given, key, existing = _begin(request)
    if existing is not None:
        return Outcome(existing, time.monotonic() - started, already_there=True)
    staging = request.out / STAGING
    try:
        with _exclusive(staging):
            return _prepare(request, stamps, given, key, staging, started)
    except OSError as error:
        raise disk_error(error, request.out) from error


def prepare_part(request: Request, part: int, parts: int) -> PartOutcome:
    """Tokenize every `parts`-th unit from the `part`-th on. Parts may run at the same time; `prepare` then merges."""
    started = time.monotonic()
    if not 0 <= part < parts:
        raise UserError(f"--part {part}/{parts} is not K/N with K from 0 to N - 1")
    if request.tokenizer is None or not request.sources:
        raise UserError("--part needs --tokenizer FILE and --source or --mix, so that all parts have the same input")
    stamps, tokenizer, _, existing = _begin(request)
    if existing is not None:
        return PartOutcome(time.monotonic() - started, 0)
    assert tokenizer is not None
    staging = request.out / STAGING
    try:
        with _exclusive(staging, among_parts=True):
            units, settings = _plan(request, stamps, tokenizer)
            units = units[part::parts]
            engine = _choose_engine(request, stamps, tokenizer)
            kept, new_tokens, _ = _tokenize(request, units, settings, tokenizer, engine, staging)
            return PartOutcome(time.monotonic() - started, len(units), kept, new_tokens)
    except OSError as error:
        raise disk_error(error, request.out) from error


def _begin(
    request: Request,
) -> tuple[dict[str, list[tuple[Path, str]]], Tokenizer | None, str, Manifest | None]:
    """The input files with stamps, the tokenizer if given, the digest of the request; and its result, if it exists."""
    _check(request)
    files = {source.name: find_files(source.path) for source in request.sources}
    stamps = {name: [(path, _stamp(path)) for path in paths] for name, paths in files.items()}
    start_fork_server()  # its imports run while the tokenizer is loaded here
    given = None if request.tokenizer is None else load_tokenizer(request.tokenizer, request.end_of_text)
    key = _request_key(request, stamps, given)
    out = request.out
    if (out / MANIFEST).exists():
        manifest = read_manifest(out)
        if manifest.request == key and not request.overwrite:
            return stamps, given, key, manifest
        if not request.overwrite:
            raise UserError(
                f"'{out}' holds a data set of other documents or settings; give another --out or --overwrite"
            )
    elif out.exists() and any(item.name != STAGING for item in out.iterdir()) and not (out / STAGING).exists():
        raise UserError(f"'{out}' is not empty and not a data set; give another --out")
    try:
        (out / STAGING).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, out) from error
    return stamps, given, key, None


def _prepare(
    request: Request,
    stamps: dict[str, list[tuple[Path, str]]],
    given: Tokenizer | None,
    key: str,
    staging: Path,
    started: float,
) -> Outcome:
    weights = {source.name: source.weight for source in request.sources}
    if not request.sources:
        stamps = _write_embedded(request, staging)
        weights = dict(corpus.WEIGHTS)
    tokenizer = given or _train_tokenizer(request, stamps, key, staging)
    units, settings = _plan(request, stamps, tokenizer)
    engine = _choose_engine(request, stamps, tokenizer)
    kept, new_tokens, lines = _tokenize(request, units, settings, tokenizer, engine, staging)
    lines.check()
    if lines.documents == 0:
        raise UserError(f"no document was found in {', '.join(weights)}: every file is empty")
    manifest, dropped = merge_units(request.out, units, settings, tokenizer, staging, weights, key)
    shutil.rmtree(staging, ignore_errors=True)
    return Outcome(
        manifest,
        time.monotonic() - started,
        engine,
        units=len(units),
        units_kept=kept,
        new_tokens=new_tokens,
        first_rejections=lines.first,
        dropped_tokens=dropped,
        worker_bytes=lines.worker_bytes,
        cpu_seconds=lines.cpu_seconds,
    )


def _plan(
    request: Request, stamps: dict[str, list[tuple[Path, str]]], tokenizer: Tokenizer
) -> tuple[list[WorkUnit], Settings]:
    settings = Settings(
        tokenizer.sha256,
        tokenizer.end_of_text,
        tokenizer.vocabulary,
        request.chunk_tokens,
        request.validation,
        request.sequence_length,
    )
    # The size of a unit depends on the input alone: small enough to balance workers, large enough for full shards.
    total = sum(estimated_text_bytes(path) for files in stamps.values() for path, _ in files)
    unit_bytes = min(64_000_000, max(2_000_000, total // 64))
    return [u for name, files in stamps.items() for u in plan_units(name, files, settings, unit_bytes)], settings


def _check(request: Request) -> None:
    if (request.tokenizer is None) == (request.train_bpe is None):
        raise UserError("give exactly one of --tokenizer FILE and --train-bpe N")
    if request.chunk_tokens < 2 or request.chunk_tokens > 1 << 22:
        raise UserError(f"--chunk-tokens {request.chunk_tokens} is not between 2 and {1 << 22}")
    length = request.sequence_length
    if length is not None and (length < 2 or request.chunk_tokens % length):
        raise UserError(
            f"--whole-documents {length}: --chunk-tokens {request.chunk_tokens} is not a multiple of it; chunks hold "
            f"whole sequences, of at least 2 tokens"
        )
    if not 0 <= request.validation < 1:
        raise UserError(f"--validation {request.validation} is not a share of at least 0 and below 1")
    if not 0 <= request.max_rejected <= 1:
        raise UserError(f"--max-rejected {request.max_rejected} is not a share between 0 and 1")
    if request.engine not in CHOICES:
        raise UserError(f"--tokenizer-engine {request.engine} is not one of {', '.join(CHOICES)}")
    if request.workers < 1:
        raise UserError(f"--workers {request.workers} is not at least 1")
    names = [source.name for source in request.sources]
    for source in request.sources:
        if not SOURCE_NAME.fullmatch(source.name):
            raise UserError(f"source name '{source.name}' must be of letters, digits, '.', '_' and '-'")
        if names.count(source.name) > 1:
            raise UserError(f"source name '{source.name}' is given twice")
        if source.weight is not None and not 0 <= source.weight < 1e300:
            raise UserError(f"weight {source.weight} of source '{source.name}' is not a number of at least 0")
    weighted = [source.name for source in request.sources if source.weight is not None]
    if weighted and len(weighted) < len(names):
        missing = next(name for name in names if name not in weighted)
        raise UserError(f"source '{missing}' has no weight but '{weighted[0]}' has: give all of them one, or none")
    if weighted and not any(source.weight for source in request.sources):
        raise UserError("every source has weight 0; give at least one a weight above 0")


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{stat.st_size}:{stat.st_mtime_ns}"


def _embedded_stamp(request: Request) -> str:
    return f"embedded {request.corpus_bytes} python {sys.version}"


def _request_key(request: Request, stamps: dict[str, list[tuple[Path, str]]], tokenizer: Tokenizer | None) -> str:
    """Digest of the request, known before any work is done."""
    return digest(
        {
            "version": _PIPELINE_VERSION,
            "sources": [[source.name, source.weight] for source in request.sources],
            "files": {name: [[str(path), stamp] for path, stamp in files] for name, files in stamps.items()},
            "embedded": None if request.sources else _embedded_stamp(request),
            "tokenizer": tokenizer.sha256 if tokenizer else f"bpe {request.train_bpe}",
            "end_of_text": request.end_of_text,
            "chunk_tokens": request.chunk_tokens,
            "validation": request.validation,
        }
        | ({} if request.sequence_length is None else {"sequence_length": request.sequence_length})
    )


@contextmanager
def _exclusive(staging: Path, among_parts: bool = False) -> Iterator[None]:
    """Lock the folder against another `prepare`; parts share the lock. It is released when the process ends."""
    with open(staging / "lock", "w") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if among_parts else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another `xgram-dist prepare` is writing to '{staging.parent}'; wait for it") from None
        yield


def _write_embedded(request: Request, staging: Path) -> dict[str, list[tuple[Path, str]]]:
    """The embedded corpus as files, reused by a rerun if they are complete and from the same Python."""
    folder = staging / "corpus"
    stamp = _embedded_stamp(request)
    marker = folder / "complete"
    if not marker.is_file() or marker.read_text() != stamp:
        shutil.rmtree(folder, ignore_errors=True)
        corpus.write_corpus(folder, request.corpus_bytes)
        write_atomically(marker, stamp)
    return {name: [(folder / f"{name}.jsonl", stamp)] for name in corpus.WEIGHTS}


def _train_tokenizer(request: Request, stamps: dict[str, list[tuple[Path, str]]], key: str, staging: Path) -> Tokenizer:
    assert request.train_bpe is not None
    file = staging / f"tokenizer-{key[:24]}.json"
    if not file.is_file():
        train_bpe(_training_texts(stamps), request.train_bpe, file)
    return load_tokenizer(file, request.end_of_text)


def _choose_engine(request: Request, stamps: dict[str, list[tuple[Path, str]]], tokenizer: Tokenizer) -> EngineChoice:
    """The tokenizer's engine, compared on the first documents of every source; a sentence where it is the slow one."""
    texts = []
    if request.engine != HUGGINGFACE:
        for files in stamps.values():
            items = read_documents(files[0][0])
            texts += first_documents(item.text for item in items if isinstance(item, Document))
    choice = choose_engine(tokenizer, request.engine, texts)
    if choice.reason is not None:
        print(f"note: Hugging Face tokenizes, much slower than gigatoken: {choice.reason}", file=sys.stderr)
    return choice


def _training_texts(stamps: dict[str, list[tuple[Path, str]]]) -> Iterator[str]:
    """The same number of characters from every source, spread over its files."""
    with Progress(None, "MB", "reading text to train the tokenizer") as progress:
        for files in stamps.values():
            left = BPE_TRAINING_BYTES / len(stamps)
            for number, (path, _) in enumerate(files):
                left_of_file = left / (len(files) - number)
                for item in read_documents(path):
                    if left_of_file <= 0:
                        break
                    if isinstance(item, Document):
                        size = len(item.text)
                        left_of_file -= size
                        left -= size
                        progress.update(size / 1e6)
                        yield item.text


@dataclass
class _LineCounts:
    """Documents and rejected lines so far; fails above the allowed share of rejected lines."""

    limit: float
    documents: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    first: list[str] = field(default_factory=list)
    worker_bytes: int = 0
    cpu_seconds: float = 0.0

    def add(self, documents: int, rejected: dict[str, int], first: list[str]) -> None:
        self.documents += documents
        self.rejected.update(rejected)
        self.first += first[: max(0, KEPT_REJECTIONS - len(self.first))]

    def check(self, least: int = 0) -> None:
        bad = self.rejected.total()
        lines = self.documents + bad
        if bad and lines >= least and bad > self.limit * lines:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.rejected.most_common())
            raise UserError(
                f"{bad:,} of {lines:,} lines ({100 * bad / lines:.2f} %) were rejected, "
                f"above --max-rejected {self.limit}: {reasons}; the first: {'; '.join(self.first[:5])}"
            )


def _tokenize(
    request: Request,
    units: list[WorkUnit],
    settings: Settings,
    tokenizer: Tokenizer,
    engine: EngineChoice,
    staging: Path,
) -> tuple[int, int, _LineCounts]:
    """Tokenize the units that are not finished: the number that were, the new tokens, the line counts of all units."""
    lines = _LineCounts(request.max_rejected)
    pending = []
    kept_bytes = 0.0
    for unit in units:
        done = unit_folder(staging, unit) / "done.json"
        if done.is_file():
            record = json.loads(done.read_bytes())
            documents = sum(record[split]["documents"] for split in SPLITS)
            lines.add(documents, record["rejected"], record["first_rejections"])
            kept_bytes += unit.input_bytes
        else:
            pending.append(unit)
    keys = {unit.key for unit in pending}
    for leftover in (staging / "units").glob("*.tmp-*"):
        if leftover.name.partition(".tmp-")[0] in keys:  # the others may belong to another part
            shutil.rmtree(leftover, ignore_errors=True)
    new_tokens = 0
    total = sum(unit.input_bytes for unit in units)
    with Progress(total / 1e6, "MB", "preparing") as progress:
        progress.update(kept_bytes / 1e6)
        if pending:
            reports = run_units(pending, settings, tokenizer, engine.name, staging, request.workers)
            try:
                for report in reports:
                    new_tokens += report.tokens
                    lines.cpu_seconds += report.cpu_seconds
                    lines.worker_bytes = max(lines.worker_bytes, report.worker_bytes)
                    lines.add(report.documents, report.rejected, report.first_rejections)
                    progress.update(
                        report.input_bytes / 1e6,
                        tokens=f"{new_tokens:,}",
                        documents=f"{lines.documents:,}",
                        rejected=f"{lines.rejected.total():,}",
                    )
                    lines.check(_EARLY_LINES)
            finally:
                reports.close()  # type: ignore[attr-defined]
    return len(units) - len(pending), new_tokens, lines

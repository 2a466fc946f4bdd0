"""Object storage: small files and whole shards, by address.

In: an address (`s3://`, `gs://`, `az://`, `abfs://`, a folder, or any that mosaicml-streaming downloads from). Out: the
bytes of an object, verified against size and hash where they are known. S3 goes through boto3, Google and Azure through
fsspec where its packages are installed (gcsfs, adlfs), all others through streaming's downloaders.

Credentials come from the environment (`AWS_ACCESS_KEY_ID`, instance roles, `GOOGLE_APPLICATION_CREDENTIALS`, ...) and
never from an address. Messages name the address and the kind of fault, and never quote a library's message, which may
hold parts of a request.

A fetch that times out, breaks off, or gives other bytes than were written is tried again with growing pauses. Missing
objects and refused access are final at once.
"""

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import xxhash

from xgram_dist.errors import BadFileError, UserError, optional_package
from xgram_dist.untrusted import MAX_JSON_BYTES, check_address, read_file

T = TypeVar("T")

ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 0.5  # doubled after every attempt
_CONNECT_SECONDS, _READ_SECONDS = 10, 60
_HASH_METADATA = "xxh128"
_ACCESS_DENIED = {"AccessDenied", "403", "401", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}
_MISSING = {"NoSuchKey", "NoSuchBucket", "NotFound", "404"}
_EXISTS = {"PreconditionFailed", "412"}


class StorageError(Exception):
    """`reason` is fit to be shown. `final`: another attempt would end the same."""

    def __init__(self, reason: str, *, final: bool = False, missing: bool = False, exists: bool = False):
        super().__init__(reason)
        self.reason, self.final, self.missing, self.exists = reason, final, missing, exists


class Store(Protocol):
    """One attempt each; faults are `StorageError`s."""

    def get(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        """At most `limit` bytes: a larger object is a fault."""
        ...

    def put(self, name: str, content: bytes) -> None: ...
    def create(self, name: str, content: bytes) -> bool:
        """Store an object that is not there yet; False: it is."""
        ...

    def size(self, name: str) -> int | None:
        """None: there is no such object."""
        ...

    def delete(self, name: str) -> None:
        """Also one that is not there."""
        ...

    def names(self, folder: str) -> list[str]:
        """Of the objects directly in a folder, without it."""
        ...

    def holds(self, name: str, content: bytes) -> bool:
        """Whether the object is known to be `content` already."""
        ...


def is_address(text: str) -> bool:
    return "://" in text


def open_store(address: str) -> Store:
    """The store of all objects below an address."""
    if not is_address(address):
        return _FolderStore(Path(address))
    check_address(address)
    scheme, _, rest = address.partition("://")
    host = rest.partition("/")[0]
    if scheme == "file":
        return _FolderStore(Path(rest))
    if scheme == "s3":
        return _S3Store(*(part.strip("/") for part in (host, rest.partition("/")[2])))
    if scheme in ("gs", "gcs", "az", "abfs", "abfss", "memory"):
        try:
            import fsspec

            return _FsspecStore(fsspec.filesystem(scheme), rest.rstrip("/"))
        except ImportError:
            pass
    return _DownloadStore(address.rstrip("/"))


def fetch(address: str, store: Store, name: str, size: int | None = None, xxh128: str | None = None) -> bytes:
    """An object, with retries; `size` and `xxh128` are what it was written with."""

    def attempt() -> bytes:
        data = store.get(name, MAX_JSON_BYTES if size is None else size)
        if size is not None and len(data) != size:
            raise StorageError(f"{len(data):,} bytes came, not {size:,}")
        if xxh128 is not None and xxhash.xxh128_hexdigest(data) != xxh128:
            raise StorageError("its hash is not the one that it was written with")
        return data

    return retry(attempt, f"cannot fetch '{address}/{name}'")


def upload(address: str, store: Store, name: str, content: bytes) -> bool:
    """Store an object, with retries; False if it was there already."""

    def attempt() -> bool:
        if store.holds(name, content):
            return False
        store.put(name, content)
        return True

    return retry(attempt, f"cannot write '{address}/{name}'")


def retry(attempt: Callable[[], T], what: str) -> T:
    """Call until it raises no `StorageError`, with growing pauses; `what` begins the sentence about the last one."""
    pause = FIRST_PAUSE_SECONDS
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except StorageError as error:
            if error.missing:
                raise FileNotFoundError(f"{what}: it does not exist") from None
            if error.final or number == ATTEMPTS:
                times = "" if error.final else f" in {ATTEMPTS} attempts"
                raise UserError(f"{what}{times}: {error.reason}") from None
        time.sleep(pause * random.uniform(0.75, 1.25))
        pause *= 2
    raise AssertionError


def _within(data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise StorageError(f"more than {limit:,} bytes came")
    return bytes(data)


class _FolderStore:
    def __init__(self, folder: Path):
        self._folder = folder

    def get(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        try:
            return read_file(self._folder / name, limit=limit, follow=True)
        except FileNotFoundError:
            raise StorageError("it does not exist", missing=True) from None
        except BadFileError as error:
            raise StorageError(str(error), final=True) from None
        except OSError as error:
            raise StorageError(str(error.strerror)) from None

    def put(self, name: str, content: bytes) -> None:
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
            unfinished.write_bytes(content)
            unfinished.rename(path)
        except OSError as error:
            raise StorageError(str(error.strerror), final=True) from None

    def create(self, name: str, content: bytes) -> bool:
        path = self._folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        except OSError as error:
            raise StorageError(str(error.strerror), final=True) from None
        return True

    def size(self, name: str) -> int | None:
        path = self._folder / name
        return path.stat().st_size if path.is_file() else None

    def delete(self, name: str) -> None:
        try:
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(str(error.strerror)) from None

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(path.name for path in (self._folder / folder).iterdir() if path.is_file())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(str(error.strerror)) from None

    def holds(self, name: str, content: bytes) -> bool:
        path = self._folder / name
        return path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content


@cache
def _s3_client(process: int, endpoint: str | None, read_seconds: float) -> Any:
    """`process`: a client must not be shared with a forked process."""
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    session = boto3.session.Session()
    settings: dict[str, Any] = {} if session.get_credentials() else {"signature_version": UNSIGNED}
    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=read_seconds,
        retries={"total_max_attempts": 1},
        max_pool_connections=32,
        **settings,
    )
    return session.client("s3", config=config, endpoint_url=endpoint, region_name=session.region_name or "us-east-1")


class _S3Store:
    def __init__(self, bucket: str, prefix: str):
        with optional_package("an address of 's3://'", "s3"):
            import boto3  # noqa: F401
        self._bucket, self._prefix = bucket, prefix

    def _client(self) -> Any:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("S3_ENDPOINT_URL")
        return _s3_client(os.getpid(), endpoint, _READ_SECONDS)

    def _key(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": f"{self._prefix}/{name}" if self._prefix else name}

    def _call(self, function: Callable[[Any], T]) -> T:
        from botocore.exceptions import ClientError, NoCredentialsError

        try:
            return function(self._client())
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", "unknown"))
            if code in _MISSING:
                raise StorageError("it does not exist", missing=True) from None
            if code in _EXISTS:
                raise StorageError("it exists", exists=True, final=True) from None
            denied = code in _ACCESS_DENIED
            hint = "; check the credentials in the environment" if denied else ""
            raise StorageError(f"the server answers {code}{hint}", final=denied) from None
        except NoCredentialsError:
            raise StorageError("there are no credentials in the environment", final=True) from None
        except Exception as error:  # time-outs and broken connections; botocore also stumbles over broken answers
            raise StorageError(type(error).__name__) from None

    def get(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        def read(client: Any) -> bytes | None:
            reply = client.get_object(**self._key(name))
            # All of it: botocore finds a connection that breaks off only then.
            return bytes(reply["Body"].read()) if reply["ContentLength"] <= limit else None

        data = self._call(read)
        if data is None:
            raise StorageError(f"it has more than {limit:,} bytes")
        return data

    def put(self, name: str, content: bytes, **conditions: str) -> None:
        metadata = {_HASH_METADATA: xxhash.xxh128_hexdigest(content)}
        self._call(lambda client: client.put_object(**self._key(name), Body=content, Metadata=metadata, **conditions))

    def create(self, name: str, content: bytes) -> bool:
        try:
            self.put(name, content, IfNoneMatch="*")
        except StorageError as error:
            if error.exists:
                return False
            raise
        return True

    def _head(self, name: str) -> Any:
        """None: there is no such object."""
        try:
            return self._call(lambda client: client.head_object(**self._key(name)))
        except StorageError as error:
            if error.missing:
                return None
            raise

    def size(self, name: str) -> int | None:
        head = self._head(name)
        return None if head is None else int(head["ContentLength"])

    def delete(self, name: str) -> None:
        self._call(lambda client: client.delete_object(**self._key(name)))

    def names(self, folder: str) -> list[str]:
        where = self._key(f"{folder}/" if folder else "")

        def pages(client: Any) -> list[str]:
            listed = client.get_paginator("list_objects_v2").paginate(
                Bucket=where["Bucket"], Prefix=where["Key"], Delimiter="/"
            )
            return [item["Key"].removeprefix(where["Key"]) for page in listed for item in page.get("Contents", [])]

        return sorted(self._call(pages))

    def holds(self, name: str, content: bytes) -> bool:
        head = self._head(name)
        if head is None:
            return False
        known = head.get("Metadata", {}).get(_HASH_METADATA)
        return bool(head["ContentLength"] == len(content) and known == xxhash.xxh128_hexdigest(content))


class _FsspecStore:
    def __init__(self, files: Any, root: str):
        self._files, self._root = files, root

    def _call(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except FileNotFoundError:
            raise StorageError("it does not exist", missing=True) from None
        except PermissionError:
            raise StorageError("access is denied; check the credentials in the environment", final=True) from None
        except Exception as error:  # each file system raises its own types
            raise StorageError(type(error).__name__) from None

    def get(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        return _within(self._call(lambda: self._files.cat_file(f"{self._root}/{name}", end=limit + 1)), limit)

    def put(self, name: str, content: bytes) -> None:
        self._call(lambda: self._files.pipe_file(f"{self._root}/{name}", content))

    def create(self, name: str, content: bytes) -> bool:
        """Not in one step: fsspec has no such call for all of its file systems."""
        if self._call(lambda: self._files.exists(f"{self._root}/{name}")):
            return False
        self.put(name, content)
        return True

    def size(self, name: str) -> int | None:
        try:
            return int(self._call(lambda: self._files.info(f"{self._root}/{name}"))["size"])
        except StorageError as error:
            if error.missing:
                return None
            raise

    def delete(self, name: str) -> None:
        try:
            self._call(lambda: self._files.rm_file(f"{self._root}/{name}"))
        except StorageError as error:
            if not error.missing:
                raise

    def names(self, folder: str) -> list[str]:
        path = f"{self._root}/{folder}".rstrip("/")
        self._files.invalidate_cache()
        try:
            found = self._call(lambda: self._files.ls(path, detail=True))
        except StorageError as error:
            if error.missing:
                return []
            raise
        return sorted(item["name"].rpartition("/")[2] for item in found if item["type"] == "file")

    def holds(self, name: str, content: bytes) -> bool:
        return False


class _DownloadStore:
    """What streaming's downloaders read: Oracle, Hugging Face, SFTP, Databricks; Google and Azure without fsspec."""

    def __init__(self, address: str):
        self._address = address

    def get(self, name: str, limit: int = MAX_JSON_BYTES) -> bytes:
        from xgram_dist.data.streaming_import import streaming

        with tempfile.TemporaryDirectory(prefix="xgram-dist-") as folder:
            local = Path(folder) / "object"
            try:
                streaming().CloudDownloader.direct_download(f"{self._address}/{name}", str(local), _READ_SECONDS)
                return read_file(local, limit=limit)
            except FileNotFoundError:
                raise StorageError("it does not exist", missing=True) from None
            except Exception as error:  # downloaders raise many types
                raise StorageError(type(error).__name__) from None

    def _refuse(self) -> NoReturn:
        scheme = self._address.partition("://")[0]
        raise StorageError(f"writing to '{scheme}://' is not offered; install its package for fsspec", final=True)

    def put(self, name: str, content: bytes) -> None:
        self._refuse()

    def create(self, name: str, content: bytes) -> bool:
        self._refuse()

    def size(self, name: str) -> int | None:
        self._refuse()

    def delete(self, name: str) -> None:
        self._refuse()

    def names(self, folder: str) -> list[str]:
        self._refuse()

    def holds(self, name: str, content: bytes) -> bool:
        return False

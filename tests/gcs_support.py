"""Google Cloud Storage on loopback, as far as obstore speaks to it: the XML calls for objects,
lists and uploads in parts, after https://cloud.google.com/storage/docs/xml-api/reference-methods.

No emulator that takes these calls for writing is on a package index: fake-gcs-server knows them for
reading only.
"""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler
from itertools import count
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from servers_support import answering

_DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


@dataclass
class Cloud:
    """`buckets` are objects by key, `uploads` parts by number of those under way, `marks` the metadata
    of objects by (id of its bucket, key), of uploads by their name.
    """

    buckets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    marks: dict[object, dict[str, str]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    numbers: count = field(default_factory=count)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""


def _tag(data: bytes) -> str:
    return f'"{md5(data).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def _run(self):
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        asked = {
            name: values[0]
            for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        }
        cloud: Cloud = self.server.cloud
        with cloud.lock:
            cloud.asked.append((self.command, self.path))
            if bucket not in cloud.buckets:
                return self._fail(404, "NoSuchBucket")
            verb = getattr(self, f"_{self.command.lower()}")
            return verb(cloud, cloud.buckets[bucket], key, asked, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _run

    def _get(self, cloud, objects, key, asked, body):
        if not key:
            return self._list(objects, asked.get("prefix", ""), asked.get("delimiter", ""))
        if key not in objects:
            return self._fail(404, "NoSuchKey")
        data, status, headers = objects[key], 200, {}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted:
            start, size = int(wanted[1]), len(data)
            if start >= size:
                return self._fail(416, "InvalidRange")
            data, status = data[start : int(wanted[2]) + 1], 206
            headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{size}"
        marks = cloud.marks.get((id(objects), key), {})
        return self._answer(status, data, {"ETag": _tag(objects[key]), **marks, **headers})

    _head = _get

    def _list(self, objects, prefix, delimiter):
        rows, folders = [], set()
        for key in sorted(key for key in objects if key.startswith(prefix)):
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                folders.add(prefix + head + delimiter)
            else:
                rows.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(objects[key])}</Size>"
                    f"<LastModified>2015-10-21T07:28:00.000Z</LastModified>"
                    f"<ETag>{escape(_tag(objects[key]))}</ETag></Contents>"
                )
        rows += [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in sorted(folders)
        ]
        self._answer(200, f"<ListBucketResult>{''.join(rows)}</ListBucketResult>".encode())

    def _put(self, cloud, objects, key, asked, body):
        if "uploadId" in asked:
            if asked["uploadId"] not in cloud.uploads:
                return self._fail(404, "NoSuchUpload")
            cloud.uploads[asked["uploadId"]][int(asked["partNumber"])] = body
        elif self.headers.get("x-goog-if-generation-match") == "0" and key in objects:
            return self._fail(412, "PreconditionFailed")
        else:
            objects[key], cloud.marks[id(objects), key] = body, self._marks()
        return self._answer(200, b"", {"ETag": _tag(body), "x-goog-generation": "1"})

    def _post(self, cloud, objects, key, asked, body):
        if "uploads" in asked:
            name = f"upload{next(cloud.numbers)}"
            cloud.uploads[name], cloud.marks[name] = {}, self._marks()
            return self._answer(
                200,
                f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
        parts = cloud.uploads.pop(asked["uploadId"], None)
        if parts is None:
            return self._fail(404, "NoSuchUpload")
        numbers = [int(row.text) for row in ElementTree.fromstring(body).iter("PartNumber")]
        if any(len(parts[number]) < 5 << 20 for number in numbers[:-1]):
            return self._fail(400, "EntityTooSmall")
        objects[key] = b"".join(parts[number] for number in numbers)
        cloud.marks[id(objects), key] = cloud.marks[asked["uploadId"]]
        tag = escape(_tag(objects[key]))
        text = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
        return self._answer(200, text.encode(), {"x-goog-generation": "1"})

    def _delete(self, cloud, objects, key, asked, body):
        if "uploadId" in asked:
            cloud.uploads.pop(asked["uploadId"], None)
        else:
            objects.pop(key, None)
        return self._answer(204, b"")

    def _marks(self):
        """What the writer of an object wants to be kept with it."""
        rows = self.headers.items()
        return {name: text for name, text in rows if name.lower().startswith("x-goog-meta-")}

    def _fail(self, status, code):
        self._answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())

    def _answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Last-Modified": _DATE, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):
                self.wfile.write(body)


@contextlib.contextmanager
def gcs():
    """A Cloud on a port of its own."""
    with answering(_Handler) as server:
        server.cloud = Cloud(url=f"http://127.0.0.1:{server.server_port}")
        yield server.cloud

"""`tiercel data fetch`, with a real https server on this machine."""

import io
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address

import pytest
from PIL import Image

from tiercel.cli.main import main
from tiercel.config.data import Data
from tiercel.data import fetch as module
from tiercel.data.fetch import FAILED, fetch
from tiercel.data.media.download import Web, download, is_public
from tiercel.data.reading import read_rows
from tiercel.errors import DataError, RunError

NAME = "pictures.test"


def picture(format="PNG", size=(8, 6)):
    stream = io.BytesIO()
    Image.new("RGB", size, "red").save(stream, format)
    return stream.getvalue()


class Pictures(BaseHTTPRequestHandler):
    """Answers by the path."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked[self.path] += 1
        name = self.path.partition("?")[0].strip("/")
        if name.startswith("to"):
            return self.answer(b"", status=302, location=self.server.targets[name])
        if name == "later" and self.server.asked[self.path] == 1:
            return self.answer(b"", status=503)
        if name == "short":
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(picture()[:20])
            self.close_connection = True
            return None
        if name == "slow":
            self.send_response(200)
            self.send_header("Content-Type", "image/png")
            self.end_headers()
            for _ in range(20):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
            self.close_connection = True
            return None
        match name:
            case "gone":
                return self.answer(b"", status=404)
            case "page":
                return self.answer(b"<html>", kind="text/html")
            case "colour":
                return self.answer(b"", kind="text/\x9b31m")
            case "odd":
                return self.answer(b"GIF89a" + bytes(50))
            case "zipped":
                return self.answer(picture(), encoding="gzip")
            case "jpeg":
                return self.answer(picture("JPEG"), kind="binary/octet-stream")
            case "large":
                return self.answer(picture() + bytes(5000))
            case "wide":
                return self.answer(picture(size=(100, 100)))
        return self.answer(picture())

    def answer(self, body, *, status=200, kind="image/png", location=None, encoding=None):
        self.send_response(status)
        for key, value in (("Content-Type", kind), ("Location", location), ("Content-Encoding", encoding)):
            if value is not None:
                self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, for a certificate")
    folder = tmp_path_factory.mktemp("certificate")
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key.pem -out cert.pem"
    more = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    subprocess.run([*made.split(), *more], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def server(certificate, monkeypatch):
    """An https server on 127.0.0.1, to which the name leads."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    served = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    served.daemon_threads, served.asked, served.targets = True, Counter(), {}
    served.socket = context.wrap_socket(served.socket, server_side=True, do_handshake_on_connect=False)
    served.handle_error = lambda *_: None  # of clients that refuse the certificate
    served.looked_up, served.leads_to = [], ["127.0.0.1"]
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    real = socket.getaddrinfo

    def look_up(host, port, *rest, **more):
        if host == NAME:
            number = min(len(served.looked_up), len(served.leads_to) - 1)
            served.looked_up.append(host)
            host = served.leads_to[number]
        return real(host, port, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    served.url = f"https://{NAME}:{served.server_port}"
    yield served
    served.shutdown()
    served.server_close()
    thread.join(5)


@pytest.fixture
def web(certificate):
    return Web(
        max_pixels=5000,
        most_bytes=4000,
        seconds=5,
        pause=0.01,
        allows=lambda address: str(address) == "127.0.0.1",
        tls=ssl.create_default_context(cafile=certificate / "cert.pem"),
    )


def get(server, web, path):
    with web.client() as client:
        return download(client, f"{server.url}/{path}", web)


def test_a_picture_is_downloaded_with_the_ending_of_its_header(server, web):
    assert get(server, web, "a.gif") == (picture(), ".png")
    assert get(server, web, "jpeg") == (picture("JPEG"), ".jpg")
    assert get(server, web, "later") == (picture(), ".png") and server.asked["/later"] == 2


@pytest.mark.parametrize(
    ("path", "reason", "times"),
    [
        ("gone", "404", 1),
        ("page", "text/html", 1),
        ("odd", "is a GIF image", 1),
        ("zipped", "compressed", 1),
        ("large", "4,000 bytes", 1),
        ("wide", "100 x 100", 1),
        ("short", "tried 3 times", 3),
        ("slow", "longer than 0.3 s", 3),
    ],
)
def test_what_is_no_picture_is_refused(server, web, path, reason, times):
    web = replace(web, seconds=0.3) if path == "slow" else web
    with pytest.raises(DataError, match=reason):
        get(server, web, path)
    assert server.asked[f"/{path}"] == times


def test_redirects_are_followed_a_few_times_and_each_is_checked(server, web):
    server.targets |= {"to-a": "/a", "to-itself": "/to-itself", "to-http": "http://example.com/a"}
    server.targets |= {"to-machine": f"https://127.0.0.2:{server.server_port}/a", "to-password": "https://a:b@x.test/"}
    assert get(server, web, "to-a") == (picture(), ".png")
    for path, reason in {
        "to-itself": "more than 5 redirects",
        "to-http": "https only",
        "to-machine": "127.0.0.2",
        "to-password": "password",
    }.items():
        with pytest.raises(DataError, match=reason):
            get(server, web, path)
    assert server.asked["/to-itself"] == 6


def test_the_connection_goes_to_the_address_that_was_checked(server, web):
    server.leads_to = ["127.0.0.1", "127.0.0.2"]  # as of a name that changes its address after the first look
    assert get(server, web, "a") == (picture(), ".png") and len(server.looked_up) == 1
    server.leads_to, server.looked_up = ["127.0.0.1", "127.0.0.2"], []
    server.targets["to-a"] = f"{server.url}/a"
    with pytest.raises(DataError, match=r"127\.0\.0\.2"):
        get(server, web, "to-a")
    assert server.asked["/a"] == 1


def test_the_certificate_must_be_of_the_name(server, web):
    with pytest.raises(DataError, match="certificate verify failed"):
        get(server, replace(web, tls=ssl.create_default_context()), "a")
    server.url = f"https://127.0.0.1:{server.server_port}"
    with pytest.raises(DataError, match="certificate verify failed"):
        get(server, web, "a")


def test_this_machine_is_not_asked_by_default(server, web):
    with pytest.raises(DataError, match=r"127\.0\.0\.1, which is not an address of the public network"):
        get(server, replace(web, allows=is_public), "a")
    assert not server.asked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("64:ff9b::5db8:d822", True),  # 93.184.216.34, as an IPv6 network shows it
        *(
            (each, False)
            for each in ("127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.5.4", "169.254.169.254", "0.0.0.0")
        ),
        *((each, False) for each in ("100.64.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1")),
        *((each, False) for each in ("::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "::ffff:10.0.0.1")),
        *((each, False) for each in ("64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:7f00:1::", "::127.0.0.1")),
    ],
)
def test_public_addresses(text, expected):
    assert is_public(ip_address(text)) == expected


def row_with(path):
    return {"messages": [{"role": "user", "content": "Where?"}], "answer": "x", "images": [path]}


def rows_with(tmp_path, *pictures):
    rows = [row_with(each) for each in pictures]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return Data(train=str(tmp_path / "rows.jsonl"))


def test_rows_get_the_names_of_the_files(server, web, tmp_path):
    (tmp_path / "own.png").write_bytes(picture())
    data = rows_with(
        tmp_path, f"{server.url}/a", "own.png", f"{server.url}/gone", f"{server.url}/a", f"{server.url}/b?c=1"
    )
    done = fetch(data, tmp_path / "to", web, 3)
    assert (done.downloaded, done.found, done.row_count) == (2, 0, 5) and server.asked["/a"] == 1
    (failed,) = map(json.loads, (tmp_path / "to" / FAILED).read_text().splitlines())
    assert (failed["line"], failed["field"]) == (3, "images") and "404" in failed["reason"]
    assert done.values["data.train"] == str(tmp_path / "to" / "train.jsonl")
    now = Data(train=done.values["data.train"], image_roots=tuple(json.loads(done.values["data.image_roots"])))
    table = read_rows(now.train, now, "grpo")
    assert [row.line for row in table.rows] == [1, 2, 4, 5] and [row.line for row in table.rejected] == [3]
    assert "tiercel data fetch" in table.rejected[0].reason
    names = [row.images[0].path for row in table.rows]
    assert (
        names[0] == names[2] != names[3] and names[0].startswith("pictures/") and names[1] == str(tmp_path / "own.png")
    )


def test_what_is_there_is_not_downloaded_again(server, web, tmp_path):
    data = rows_with(tmp_path, f"{server.url}/a", f"{server.url}/later")
    fetch(data, tmp_path / "to", replace(web, tries=1), 2)
    (there,) = (tmp_path / "to" / "pictures").glob("*/*")
    there.with_suffix(".part").write_bytes(b"half")
    done = fetch(data, tmp_path / "to", web, 2)
    assert (done.downloaded, done.found, done.failed) == (1, 1, ())
    assert server.asked == {"/a": 1, "/later": 2} and not list((tmp_path / "to").rglob("*.part"))
    assert not (tmp_path / "to" / FAILED).exists()
    there.write_bytes(b"")  # as after a power cut
    assert fetch(data, tmp_path / "to", web, 2).downloaded == 1


def test_a_recipe_with_an_image_root_gets_whole_paths(server, web, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "own.png").write_bytes(picture())
    data = rows_with(tmp_path, f"{server.url}/a", "own.png").model_copy(update={"image_root": str(tmp_path / "images")})
    done = fetch(data, tmp_path / "to", web, 1)
    now = data.model_copy(update={"train": done.values["data.train"]})
    now = now.model_copy(update={"image_roots": tuple(json.loads(done.values["data.image_roots"]))})
    names = [row.images[0].path for row in read_rows(now.train, now, "grpo").rows]
    assert names[0].startswith(str(tmp_path / "to" / "pictures")) and names[1] == "own.png"


def test_parts_as_json_text_and_a_row_that_cannot_be_read(server):
    """Tables with one type for each column have such text; what Python prints is rejected by the run, not here."""
    part = {"type": "image", "image": f"{server.url}/a"}
    row = {"messages": [{"role": "user", "content": json.dumps([part, {"type": "text", "text": "?"}])}], "answer": "x"}
    changed = module._changed(row, {}, lambda path: "new")
    assert changed["messages"][0]["content"][0] == {"type": "image", "image": "new"}
    printed = {"prompt": "[{'role': 'user', 'content': 'q'}]", "image": f"{server.url}/a"}
    assert module._changed(printed, {}, lambda path: "new") == {**printed, "image": "new"}


@pytest.mark.parametrize(
    ("kind", "key", "form"), [("image_url", "image_url", dict), ("image", "image", str), ("image", "url", str)]
)
def test_pictures_of_parts_and_of_renamed_columns_are_found(server, web, tmp_path, kind, key, form):
    def address(url):
        return {"url": url} if form is dict else url

    part = {"type": kind, key: address(f"{server.url}/a")}
    turns = [{"role": "user", "content": [{"type": "text", "text": f"{server.url}/text"}, part]}]
    row = {"messages": turns, "answer": "x", "source": f"{server.url}/source", "image": {"path": "x", "bytes": "eA=="}}
    found: list[str] = []
    changed = module._changed(row, {}, lambda path: found.append(path) or "new")
    assert found == [f"{server.url}/a"] and changed["source"] == row["source"] and changed["image"] == row["image"]
    assert changed["messages"][0]["content"][1] == {"type": kind, key: address("new")}
    renamed = {"meta": {"photo": f"{server.url}/a", "page": f"{server.url}/b"}, "question": "?", "answer": "x"}
    assert module._changed(renamed, {"image": "meta.photo"}, lambda path: "new")["meta"] == {
        **renamed["meta"],
        "photo": "new",
    }


def test_pictures_in_renamed_columns_stay_and_numbers_that_are_missing_go(server, web, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pictures = [[{"bytes": picture(), "path": "x"}], [{"bytes": None, "path": f"{server.url}/a"}]]
    columns = {"pics": pictures, "question": ["?", "?"], "answer": ["a", "b"], "score": [float("nan"), 1.0]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    data = Data(train=str(tmp_path / "rows.parquet"), columns={"images": "pics"})
    assert fetch(data, tmp_path / "to", web, 1).failed == ()
    rows = read_rows(tmp_path / "to/train.jsonl", data, "grpo").rows
    assert [len(row.images) for row in rows] == [1, 1] and rows[0].images[0].data == picture()
    assert [row.columns for row in rows] == [{}, {"score": 1.0}]


def test_a_part_of_the_rows_and_several_files(server, web, tmp_path):
    data = rows_with(tmp_path, *(f"{server.url}/{number}" for number in range(6)))
    done = fetch(data.model_copy(update={"train": f"{data.train}#2"}), tmp_path / "to", web, 2)
    assert (done.row_count, done.downloaded) == (2, 2)
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps(row_with("own.png")) + "\n")
    mixed = Data(train=str(own), mix=({"path": data.train},), eval=str(own))
    assert fetch(mixed, tmp_path / "other", web, 2).values == {"data.mix.0.path": str(tmp_path / "other/mix-0.jsonl")}
    listed = fetch(Data(train=[str(own), f"{data.train}#2"]), tmp_path / "listed", web, 2)
    assert (listed.row_count, listed.downloaded) == (3, 2)
    assert (
        len(read_rows(tmp_path / "listed/train.jsonl", Data(train="-", image_roots=(str(tmp_path),)), "grpo").rows) == 3
    )
    with pytest.raises(DataError, match="no row names a picture by a URL"):
        fetch(Data(train=str(own)), tmp_path / "none", web, 2)


def test_what_a_server_and_a_row_say_is_shown_without_control_characters(server, web, tmp_path):
    fetch(rows_with(tmp_path, f"{server.url}/colour", f"{server.url}/\x1b[31m"), tmp_path / "to", web, 1)
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "to" / FAILED).read_text().splitlines()]
    assert len(reasons) == 2 and all(reason.isprintable() for reason in reasons)


def test_secrets_of_an_address_are_not_written(server, web, tmp_path):
    fetch(rows_with(tmp_path, f"{server.url}/gone?token=abcdefghijk"), tmp_path / "to", web, 1)
    assert "abcdefghijk" not in (tmp_path / "to" / FAILED).read_text()


def test_the_command_says_what_to_write_into_the_recipe(server, web, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tiercel.cli.data.Web", lambda max_pixels: web)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    data = rows_with(tmp_path, f"{server.url}/a", f"{server.url}/gone")
    recipe = tmp_path / "recipe.yaml"
    tree = {"model": {"path": str(tmp_path / "model")}, "data": {"train": data.train}, "train": {"steps": 1}}
    recipe.write_text(json.dumps({**tree, "output": str(tmp_path / "run")}))
    words = ["data", "fetch", str(recipe), "--to", str(tmp_path / "to")]
    assert main([*words, "data.max_bad_fraction=0.5"]) == 0
    assert f"data.train={tmp_path / 'to' / 'train.jsonl'}" in capsys.readouterr().out
    assert main(words) == 2
    told = capsys.readouterr()
    assert "0 pictures downloaded, 1 were there; 1 row without theirs" in told.out and "404" in told.err


def test_only_a_folder_of_its_own_is_written(server, web, tmp_path):
    data = rows_with(tmp_path, f"{server.url}/a", f"{server.url}/later")
    with pytest.raises(RunError, match="give --to an empty or a new folder"):
        fetch(data, tmp_path, web, 1)
    done = fetch(data, tmp_path / "to", replace(web, tries=1), 1)
    again = Data(train=done.values["data.train"])  # rows with one URL left, which are also written there
    assert fetch(again, tmp_path / "to", web, 1).downloaded == 1
    table = read_rows(again.train, Data(train=again.train, image_roots=(str(tmp_path / "to"),)), "grpo")
    assert len(table.rows) == 2


def test_a_folder_that_cannot_be_written_is_told(server, web, tmp_path):
    (tmp_path / "to").write_text("mine")
    with pytest.raises(RunError, match="cannot be written"):
        fetch(rows_with(tmp_path, f"{server.url}/a"), tmp_path / "to", web, 1)

import base64
import os
import time
import tracemalloc

import pytest

from server.errors import MediaError
from server.media.data_uri import CHUNK_CHARS, decode_data_uri, is_data_uri

DATA = bytes(range(256)) + b"\xfb\xff\xfe>"  # its base64 has both + and /, and a padding
TEXT = base64.b64encode(DATA).decode()
LIMIT = 1 << 20


def decode(url, max_bytes=LIMIT):
    return decode_data_uri(url, max_bytes=max_bytes, param="messages[0].content[1].image_url.url")


def lines(text, width=76, between="\n"):
    return between.join(text[start : start + width] for start in range(0, len(text), width))


ACCEPTED = {
    "plain": f"data:image/png;base64,{TEXT}",
    "upper case": f"DATA:IMAGE/JPEG;BASE64,{TEXT}",
    "mixed case type": f"data:image/PNG;base64,{TEXT}",
    "charset": f"data:image/png;charset=utf-8;base64,{TEXT}",
    "name": f"data:image/png;name=a b.png;base64,{TEXT}",
    "base64 first": f"data:image/png;base64;charset=utf-8,{TEXT}",
    "no type": f"data:;base64,{TEXT}",
    "octet stream": f"data:application/octet-stream;base64,{TEXT}",
    "blanks in the header": f"  data:image/png; base64 ,{TEXT}",
    "line feeds": f"data:image/png;base64,{lines(TEXT)}",
    "carriage returns": "data:image/png;base64,\r\n" + lines(TEXT, 64, "\r\n") + "\r\n",
    "indent": "data:image/png;base64,\n    " + lines(TEXT, 60, "\n    "),
    "tabs": f"data:image/png;base64,\t{lines(TEXT, 60, chr(9))}",
    "no padding": f"data:image/png;base64,{TEXT.rstrip('=')}",
    "too much padding": f"data:image/png;base64,{TEXT}==",
    "url-safe": "data:image/png;base64," + TEXT.replace("+", "-").replace("/", "_"),
    "url-safe, no padding": "data:image/png;base64," + TEXT.replace("+", "-").replace("/", "_").rstrip("="),
    "plus became blank": "data:image/png;base64," + TEXT.replace("+", " "),
    "plus became blank, no padding": "data:image/png;base64," + TEXT.replace("+", " ").rstrip("="),
    "percent-encoded": "data:image/png;base64," + TEXT.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
    "percent-encoded line feeds": f"data:image/png;base64,{lines(TEXT, 76, '%0A')}",
}


@pytest.mark.parametrize("url", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_careless_spellings_give_the_bytes_that_were_sent(url):
    assert is_data_uri(url)
    assert decode(url) == DATA


REFUSED = {
    "no comma": ("data:image/png;base64" + TEXT.replace(",", ""), "no comma"),
    "empty payload": ("data:image/png;base64,", "empty"),
    "only blanks": ("data:image/png;base64,  \n", "empty"),
    "only padding": ("data:image/png;base64,====", "base64|empty"),
    "junk characters": ("data:image/png;base64," + TEXT[:40] + "!*" + TEXT[40:], "not valid base64"),
    "padding inside": ("data:image/png;base64," + TEXT + TEXT, "not valid base64"),
    "one character too many": ("data:image/png;base64,AAAAA", "not valid base64"),
    "not ASCII": ("data:image/png;base64,AAAÄ", "not valid base64"),
    "percent without meaning": ("data:image/png;base64,AA%4", "not valid base64"),
    "doubled prefix": (f"data:image/png;base64,data:image/png;base64,{TEXT}", "not valid base64"),
    "bare base64": (TEXT, "not a data URI"),
    "other scheme": ("https://example.com/a.png", "not a data URI"),
    "text svg": ("data:image/svg+xml;utf8,<svg xmlns='http://www.w3.org/2000/svg'/>", "must be base64"),
    "base64 as a type": (f"data:base64,{TEXT}", "must be base64"),
    "nothing": ("", "not a data URI"),
}


@pytest.mark.parametrize(("url", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_base64_is_refused_by_name_of_the_field(url, message):
    with pytest.raises(MediaError, match=message) as caught:
        decode(url)
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert caught.value.status == 400
    assert TEXT[:16] not in caught.value.message


@pytest.mark.parametrize("between", ["", "\n"])
def test_the_limit_is_exact_whatever_the_layout(between):
    for length in range(90, 110):
        url = "data:;base64," + lines(base64.b64encode(bytes(length)).decode(), 4, between)
        if length <= 100:
            assert len(decode(url, max_bytes=100)) == length
        else:
            with pytest.raises(MediaError, match="limit of 100 bytes"):
                decode(url, max_bytes=100)


def test_too_large_is_refused_without_decoding_it():
    url = "data:image/png;base64," + "A" * (8 << 20)
    tracemalloc.start()
    with pytest.raises(MediaError, match="limit of 1000 bytes"):
        decode(url, max_bytes=1000)
    with pytest.raises(MediaError, match="limit of 1000 bytes"):
        decode("data:image/png;base64," + "%2B" * 4000, max_bytes=1000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < len(url) * 1.5  # the payload is cut out of the string once, and nothing more


@pytest.mark.parametrize("extra", [-3, -1, 0, 1, 3])
def test_pieces_join_at_every_remainder(extra):
    data = os.urandom(CHUNK_CHARS // 4 * 3 * 2 + extra)
    assert decode("data:;base64," + base64.b64encode(data).decode()) == data
    assert decode("data:;base64," + base64.b64encode(data).decode().rstrip("=")) == data


def test_padding_at_the_end_of_a_piece_is_still_padding_inside():
    piece = "A" * (CHUNK_CHARS - 1) + "="
    with pytest.raises(MediaError, match="not valid base64"):
        decode("data:;base64," + piece + "AAAA")


def test_hostile_escapes_cost_no_more_than_their_length():
    started = time.process_time()
    with pytest.raises(MediaError):
        decode("data:;base64," + "%41" * (1 << 20), max_bytes=8 << 20)
    assert time.process_time() - started < 1

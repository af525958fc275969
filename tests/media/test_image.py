"""Every kind of picture file: what is accepted shows the right colours, what is not is a `MediaError` of ours."""

import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from server.errors import MediaError
from server.media.geometry import IMAGE_AREA, IMAGE_LONG_SIDE, Size, grid_of, long_side_rule, num_tokens
from server.media.image import plan_image
from server.media.sniff import sniff
from tests.media.media_cards import BLUE, RED, WHITE, decode_image, encode, halves, png_chunk, png_header, png_with

MAX_PIXELS = 1 << 26
ORIENTATION = 0x0112


def plan(data, rule=IMAGE_AREA):
    return plan_image(data, rule, max_pixels=MAX_PIXELS)


def colours(data):
    """The colours left of the middle and right of it, and the picture's tokens."""
    found = plan(data)
    pixels = decode_image(data, found.size, max_pixels=MAX_PIXELS)
    height, width, _ = pixels.shape
    assert (width, height) == (found.size.width, found.size.height)
    return pixels[height // 2, width // 4], pixels[height // 2, width * 3 // 4], num_tokens(grid_of(found.size))


def assert_colours(data, left, right, *, tokens=6, within=3):
    left_seen, right_seen, tokens_seen = colours(data)
    assert np.abs(left_seen.astype(int) - left).max() <= within
    assert np.abs(right_seen.astype(int) - right).max() <= within
    assert tokens_seen == tokens


def assert_refused(data, message):
    """Refused by the plan or, when only pixels are at fault, by the decoder."""
    with pytest.raises(MediaError, match=message) as caught:
        decode_image(data, plan(data).size, max_pixels=MAX_PIXELS)
    assert " at 0x" not in caught.value.message
    assert "PIL" not in caught.value.message


def gray_halves(left, right, dtype):
    levels = np.full((64, 96), left, dtype)
    levels[:, 48:] = right
    return levels


def srgb_with_red_and_blue_swapped():
    """Whoever applies this colour profile sees red as blue."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return profile.replace(b"rXYZ", b"xxxx", 1).replace(b"bXYZ", b"rXYZ", 1).replace(b"xxxx", b"bXYZ", 1)


PROFILES = {
    "swapped": srgb_with_red_and_blue_swapped(),
    "lab": ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes(),
    "junk": b"not a profile",
}

# orientation -> colours of the upright picture at the upper left, upper right, lower left, lower right
UPRIGHT = {
    1: (RED, BLUE, WHITE, WHITE),
    2: (BLUE, RED, WHITE, WHITE),
    3: (WHITE, WHITE, BLUE, RED),
    4: (WHITE, WHITE, RED, BLUE),
    5: (RED, WHITE, BLUE, WHITE),
    6: (WHITE, RED, WHITE, BLUE),
    7: (WHITE, BLUE, WHITE, RED),
    8: (BLUE, WHITE, RED, WHITE),
}


class TestFormats:
    @pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF"])
    def test_lossless(self, kind):
        assert_colours(encode(halves(), kind), RED, BLUE)

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            ("JPEG", {}),
            ("JPEG", {"progressive": True}),
            ("JPEG", {"subsampling": "4:4:4"}),
            ("JPEG", {"subsampling": "4:1:1"}),
            ("WEBP", {}),
            ("WEBP", {"lossless": True}),
            ("AVIF", {}),
        ],
    )
    def test_lossy(self, kind, options):
        assert_colours(encode(halves(), kind, quality=95, **options), RED, BLUE, within=8)

    def test_icon_of_several_sizes_shows_its_largest(self):
        data = encode(halves(128, 128), "ICO", sizes=[(16, 16), (128, 128), (32, 32)])
        assert_colours(data, RED, BLUE, tokens=25)

    def test_icon_that_is_larger_than_it_declares(self):
        inner = encode(halves(128, 128), "PNG")
        entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inner), 22)
        assert_colours(struct.pack("<HHH", 0, 1, 1) + entry + inner, RED, BLUE, tokens=25)

    def test_bitmap_stored_from_top_to_bottom(self):
        data = bytearray(encode(halves(), "BMP"))
        struct.pack_into("<i", data, 22, -64)
        assert_colours(bytes(data), RED, BLUE)

    @pytest.mark.parametrize("compression", ["group4", "group3"])
    def test_fax(self, compression):
        data = encode(Image.fromarray(gray_halves(0, 255, np.uint8)).convert("1"), "TIFF", compression=compression)
        assert_colours(data, (0, 0, 0), WHITE)

    @pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "jpeg"])
    def test_compressed_tiff(self, compression):
        assert_colours(encode(halves(), "TIFF", compression=compression), RED, BLUE, within=8)

    def test_garbage_behind_the_end_is_ignored(self):
        assert_colours(encode(halves(), "JPEG", quality=95) + bytes(1000), RED, BLUE, within=8)

    @pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
    def test_an_animation_is_its_first_frame(self, kind):
        second = Image.new("RGB", (96, 64), (0, 255, 0))
        data = encode(
            halves(), kind, save_all=True, append_images=[second] * 3, **({"lossless": True} if kind == "WEBP" else {})
        )
        assert_colours(data, RED, BLUE)

    def test_the_several_pictures_of_a_phones_jpeg_are_its_first(self):
        second = Image.new("RGB", (96, 64), (0, 255, 0))
        data = encode(halves(), "MPO", save_all=True, append_images=[second], quality=95)
        assert sniff(data) == "JPEG"
        assert_colours(data, RED, BLUE, within=8)

    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
    @pytest.mark.parametrize("profile", ["swapped", "lab", "junk"])
    def test_colours_are_those_that_are_stored_whatever_the_profile(self, kind, profile):
        data = encode(halves(), kind, icc_profile=PROFILES[profile])
        assert_colours(data, RED, BLUE, within=8)


class TestModes:
    def test_gray(self):
        gray = Image.fromarray(gray_halves(40, 200, np.uint8))
        assert_colours(encode(gray, "PNG"), (40, 40, 40), (200, 200, 200))
        assert_colours(encode(gray, "JPEG"), (40, 40, 40), (200, 200, 200))

    def test_one_bit(self):
        data = encode(Image.fromarray(gray_halves(0, 255, np.uint8)).convert("1"), "PNG")
        assert_colours(data, (0, 0, 0), WHITE)

    def test_palette(self):
        assert_colours(encode(halves().quantize(4), "PNG"), RED, BLUE)

    @pytest.mark.parametrize("transparency", [0, bytes([0, 255])], ids=["index", "bytes"])
    def test_transparent_palette_entries_are_white(self, transparency):
        image = Image.fromarray(gray_halves(0, 1, np.uint8)).convert("P")
        image.putpalette([*RED, *BLUE])
        assert_colours(encode(image, "PNG", transparency=transparency), WHITE, BLUE)

    def test_transparent_gif_is_white(self):
        image = Image.fromarray(gray_halves(0, 1, np.uint8)).convert("P")
        image.putpalette([*RED, *BLUE])
        assert_colours(encode(image, "GIF", transparency=0), WHITE, BLUE)

    @pytest.mark.parametrize("kind", ["PNG", "WEBP", "AVIF", "TIFF"])
    def test_colours_hidden_under_transparency_do_not_show(self, kind):
        image = halves().convert("RGBA")
        image.putalpha(Image.fromarray(gray_halves(0, 255, np.uint8)))
        options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
        assert_colours(encode(image, kind, **options), WHITE, BLUE, within=8)

    def test_half_transparency_is_half_white(self):
        image = halves().convert("RGBA")
        image.putalpha(128)
        assert_colours(encode(image, "PNG"), (255, 127, 127), (127, 127, 255))

    def test_gray_with_alpha(self):
        image = Image.fromarray(gray_halves(40, 40, np.uint8)).convert("LA")
        image.putalpha(Image.fromarray(gray_halves(0, 255, np.uint8)))
        assert_colours(encode(image, "PNG"), WHITE, (40, 40, 40))

    def test_transparent_colour_of_an_rgb_picture(self):
        assert_colours(encode(halves(), "PNG", transparency=RED), WHITE, BLUE)

    def test_sixteen_bits_keep_their_upper_eight(self):
        levels = gray_halves(0x2000, 0xC0FF, np.uint16)
        assert_colours(encode(Image.fromarray(levels), "PNG"), (0x20,) * 3, (0xC0,) * 3, within=0)
        assert_colours(encode(Image.fromarray(levels), "TIFF"), (0x20,) * 3, (0xC0,) * 3, within=0)

    def test_sixteen_bits_of_big_endian_tiff(self):
        big = Image.frombytes("I;16B", (96, 64), gray_halves(0x2000, 0xC0FF, np.dtype(">u2")).tobytes())
        assert_colours(encode(big, "TIFF"), (0x20,) * 3, (0xC0,) * 3, within=0)

    def test_transparent_level_of_sixteen_bits(self):
        data = encode(Image.fromarray(gray_halves(0x2000, 0xC0FF, np.uint16)), "PNG")
        assert_colours(png_with(data, png_chunk(b"tRNS", b"\x20\x00")), WHITE, (0xC0,) * 3)

    @pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
    def test_cmyk(self, kind):
        assert_colours(encode(halves().convert("CMYK"), kind), RED, BLUE, within=8)

    @pytest.mark.parametrize(
        ("image", "message"),
        [
            (Image.fromarray(gray_halves(0, 1, np.float32)), "floating-point"),
            (Image.fromarray(gray_halves(0, 1, np.int32)), "32 bits"),
            (Image.new("LAB", (96, 64)), "Lab"),
        ],
    )
    def test_what_has_no_plain_meaning_in_eight_bits_is_refused_by_name(self, image, message):
        assert_refused(encode(image, "TIFF"), f"{message}.*not supported")


class TestOrientation:
    @staticmethod
    def quadrants():
        image = Image.new("RGB", (112, 56), WHITE)
        image.paste(RED, (0, 0, 56, 28))
        image.paste(BLUE, (56, 0, 112, 28))
        return image

    @pytest.mark.parametrize("orientation", UPRIGHT)
    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
    def test_every_orientation_in_every_container_is_turned_upright_once(self, kind, orientation):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options = {"TIFF": {"tiffinfo": {ORIENTATION: orientation}}, "PNG": {"exif": exif}}.get(
            kind, {"exif": exif, "quality": 95}
        )
        data = encode(self.quadrants(), kind, **options)
        found = plan(data, IMAGE_LONG_SIDE)
        sides = (56, 112) if orientation >= 5 else (112, 56)
        assert found.size == Size(*(2 * side for side in sides))
        pixels = decode_image(data, found.size, max_pixels=MAX_PIXELS)
        height, width, _ = pixels.shape
        seen = [pixels[y * height // 4, x * width // 4] for y in (1, 3) for x in (1, 3)]
        assert np.abs(np.array(seen, int) - UPRIGHT[orientation]).max() <= 12

    def test_sixteen_bits_are_turned_too(self):
        exif = Image.Exif()
        exif[ORIENTATION] = 3
        data = encode(Image.fromarray(gray_halves(0x2000, 0xC0FF, np.uint16)), "PNG", exif=exif)
        assert_colours(data, (0xC0,) * 3, (0x20,) * 3, within=0)

    def test_an_orientation_behind_the_pixels_of_a_png_counts(self):
        exif = Image.Exif()
        exif[ORIENTATION] = 6
        late = png_with(encode(halves(), "PNG"), png_chunk(b"eXIf", exif.tobytes()[6:]), before=b"IEND")
        assert plan(late).size == Size(56, 84)
        assert decode_image(late, Size(56, 84), max_pixels=MAX_PIXELS).shape == (84, 56, 3)

    @pytest.mark.parametrize(
        "exif", [b"Exif\0\0MM\0*\xff\xff\xff\xff", b"Exif\0\0", b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\xff" * 40, b"nonsense"]
    )
    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
    def test_malformed_exif_is_ignored(self, kind, exif):
        assert_colours(encode(halves(), kind, exif=exif, quality=95), RED, BLUE, within=8)

    @pytest.mark.parametrize("value", [0, 9, 255])
    def test_unknown_orientation_is_none(self, value):
        exif = Image.Exif()
        exif[ORIENTATION] = value
        assert_colours(encode(halves(), "JPEG", exif=exif, quality=95), RED, BLUE, within=8)


class TestRefusals:
    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "BMP", "TIFF"])
    def test_half_a_file(self, kind):
        noise = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 96, 3), np.uint8))
        data = encode(noise, kind)
        assert_refused(data[: len(data) // 2], f"{kind} picture")

    @pytest.mark.parametrize(
        ("data", "name"),
        [
            (b"", "empty"),
            (bytes(1000), "unknown type"),
            (b"hello, world", "unknown type"),
            (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
            (b"\n  <html>", "HTML"),
            (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
            (b"%PDF-1.7\n", "PDF"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "PostScript"),
            (b"\xff\x0a" + bytes(50), "JPEG XL"),
            (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
            (b"\xd7\xcd\xc6\x9a" + bytes(50), "WMF"),
            (struct.pack(">I", 24) + b"ftypheic" + bytes(4) + b"mif1heic" + bytes(50), "HEIC"),
            (struct.pack(">I", 24) + b"ftypisom" + bytes(4) + b"isommp42" + bytes(50), "MP4"),
            (b"RIFF" + bytes(4) + b"AVI " + bytes(50), "AVI"),
            (b"\x1aE\xdf\xa3" + bytes(50), "Matroska"),
        ],
    )
    def test_other_files_are_refused_by_their_name(self, data, name):
        assert_refused(data, f"{name}.*not supported")

    @pytest.mark.parametrize("kind", ["PPM", "TGA", "PCX", "JPEG2000", "SGI"])
    def test_formats_that_pillow_knows_but_we_do_not_allow(self, kind):
        assert_refused(encode(halves(), kind), "not supported")

    @pytest.mark.parametrize("magic", [b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM", b"II*\0", b"\0\0\1\0"])
    def test_a_magic_number_and_nothing_behind_it(self, magic):
        assert_refused(magic + b"\0" * 40, "picture")

    def test_many_pixels_in_few_bytes(self):
        started = time.process_time()
        black = png_chunk(b"IDAT", zlib.compress(bytes(20000 * 2501))) + png_chunk(b"IEND", b"")
        assert_refused(png_header(20000, 20000, bits=1, colour=0) + black, "too many pixels")
        assert_refused(png_header(60000, 60000), "unreadable header")
        pixels = png_chunk(b"IDAT", zlib.compress(b""))
        assert_refused(png_header(60000, 60000) + pixels, "too many pixels")
        assert_refused(png_header(9000, 9000) + pixels, "9000x9000 pixels; the limit is 67108864 pixels")
        assert time.process_time() - started < 5

    @pytest.mark.parametrize("size", [(1, 300), (300, 1)])
    def test_a_sliver(self, size):
        assert_refused(encode(Image.new("RGB", size), "PNG"), "200 times")

    def test_no_pixels(self):
        assert_refused(png_header(0, 10), "picture")

    @pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
    @pytest.mark.parametrize("before", [b"IDAT", b"IEND"])
    def test_an_inflating_chunk_takes_no_memory(self, kind, before):
        bomb = zlib.compress(bytes(64 << 20), 9)
        head = {b"zTXt": b"k\0\0", b"iTXt": b"k\0\1\0\0\0", b"iCCP": b"k\0\0"}[kind]
        data = png_with(encode(halves(), "PNG"), png_chunk(kind, head + bomb), before=before)
        tracemalloc.start()
        assert_refused(data, "PNG picture")
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 16 << 20


class TestPlan:
    def test_the_declared_type_plays_no_part(self):
        assert sniff(encode(halves(), "PNG")) == "PNG"
        assert sniff(encode(halves(), "AVIF")) == "AVIF"

    @pytest.mark.parametrize(("size", "tokens"), [((1, 1), 4), ((200, 1), 29), ((13, 13), 4)])
    def test_small_pictures_grow(self, size, tokens):
        data = encode(Image.new("RGB", size, RED), "PNG")
        found = plan(data)
        assert num_tokens(grid_of(found.size)) == tokens
        assert (decode_image(data, found.size, max_pixels=MAX_PIXELS) == RED).all()

    def test_no_pixel_is_decoded(self):
        data = encode(Image.new("RGB", (4000, 4000), RED), "PNG")
        started = time.process_time()
        for _ in range(20):
            plan(data)
        assert time.process_time() - started < 0.5

    def test_the_content_hash_covers_bytes_and_result_but_not_the_way_to_it(self):
        red, blue = (encode(Image.new("RGB", (1000, 1000), colour), "PNG") for colour in (RED, BLUE))
        hashes = {
            plan(red).content_hash,
            plan(blue).content_hash,
            plan(red + b"\0").content_hash,
            plan(red, IMAGE_LONG_SIDE).content_hash,
        }
        assert len(hashes) == 4
        assert all(len(value) == 32 for value in hashes)
        # 1000 pixels come out as 1008 under both caps, so the pixels are the same ones.
        caps = [long_side_rule(cap) for cap in (1008, 2016)]
        assert len({plan(red, rule).content_hash for rule in caps}) == 1

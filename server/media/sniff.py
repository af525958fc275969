"""What kind of file some bytes are, by their first bytes; declared types and names are not believed."""

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"\0\0\1\0", "ICO"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"\xd7\xcd\xc6\x9a", "WMF"),
    (b"8BPS", "PSD"),
    (b"\x1aE\xdf\xa3", "a Matroska or WebM video"),
)
_AVIF_BRANDS = (b"avif", b"avis")
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
_TEXT_BYTES = 512


def sniff(data: bytes) -> str:
    """A short name for the file type; Pillow's own name where the format is one of pictures, else words for an error."""
    if not data:
        return "empty"
    for magic, name in _MAGIC:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF":
        return {b"WEBP": "WEBP", b"AVI ": "an AVI video"}.get(data[8:12], "an unknown RIFF file")
    if data[4:8] == b"ftyp":
        return _sniff_iso(data)
    head = data[:_TEXT_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith((b"<!doctype html", b"<html")):
        return "HTML"
    if b"<svg" in head:
        return "SVG"
    return "of an unknown type"


def _sniff_iso(data: bytes) -> str:
    length = int.from_bytes(data[:4], "big")
    brands = [data[8:12], *(data[start : start + 4] for start in range(16, min(length, 256, len(data)), 4))]
    if any(brand in _AVIF_BRANDS for brand in brands):
        return "AVIF"
    return "HEIC" if any(brand in _HEIF_BRANDS for brand in brands) else "an MP4 or QuickTime video"

"""Reading images and masks, from files or packed end to end in an .npz archive."""

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from jaxtyping import UInt8

from clearhead.errors import InputError


def open_rgb_image(source: Path | bytes, name: str = "") -> Any:
    """Open a PIL image as it is stored: EXIF rotation is ignored, because boxes and masks refer to stored pixels."""
    from PIL import Image

    from clearhead.adapters.readers.image import convert_to_rgb

    return _open_file(lambda file: convert_to_rgb(Image.open(file)), source, name)


def open_label_map(source: Path | bytes, name: str = "") -> UInt8[np.ndarray, "height width"]:
    """Open an image of integers (a trimap, a class per pixel); palette indices are not converted to colours."""
    from PIL import Image

    levels = _open_file(lambda file: np.asarray(Image.open(file)), source, name)
    if levels.ndim != 2:
        raise InputError(
            f"{name or str(source)!r} is not a map with one number per pixel: it has the shape {levels.shape}"
        )
    return levels


def _open_file(read: Callable[[Any], Any], source: Path | bytes, name: str) -> Any:
    """Call `read` on a path or on bytes; any failure becomes an `InputError` that names the image."""
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    name = name or repr(str(source))
    try:
        return read(file)
    except FileNotFoundError:
        raise InputError(f"there is no image {name}: check that the data set has been unpacked completely") from None
    except (OSError, ValueError, SyntaxError, EOFError) as problem:
        raise InputError(f"{name} cannot be opened as an image ({problem})") from None


@dataclass(frozen=True)
class NpzArchive:
    """An .npz archive whose large arrays stay on disk (memory-mapped); every process opens it itself.

    Attributes:
        path: The .npz file.
    """

    path: Path

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name."""
        try:
            with ZipFile(self.path) as archive:
                return {
                    info.filename.removesuffix(".npy"): self._load_array(archive, info) for info in archive.infolist()
                }
        except (BadZipFile, ValueError) as problem:
            raise InputError(f"{str(self.path)!r} is not a readable .npz file ({problem})") from None

    def _load_array(self, archive: ZipFile, info: Any) -> np.ndarray:
        """Memory-map the array if it is stored uncompressed, else read it."""
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            read_header = np.lib.format.read_array_header_2_0
            if version == (1, 0):
                read_header = np.lib.format.read_array_header_1_0
            shape, is_fortran, dtype = read_header(member)
            start = member.tell()
            if info.compress_type != ZIP_STORED or is_fortran or dtype.hasobject or 0 in shape:
                with np.load(self.path) as npz:
                    return np.asarray(npz[info.filename.removesuffix(".npy")])
        with self.path.open("rb") as file:  # the data begins after the member's local header, whose length varies
            file.seek(info.header_offset + 26)
            name_length, extra_length = struct.unpack("<HH", file.read(4))
        start += info.header_offset + 30 + name_length + extra_length
        return np.memmap(self.path, dtype=dtype, mode="r", offset=start, shape=shape)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array by name, memory-mapped if it is stored uncompressed; `InputError` if there is none."""
        if name not in self.arrays:
            raise InputError(f"{str(self.path)!r} contains no {name!r}, only {', '.join(self.arrays)}")
        return self.arrays[name]

    def read_member(self, index: int, data: str = "data", offsets: str = "off") -> bytes:
        """Return one of the files that are packed end to end in the array `data`."""
        start, stop = self[offsets][index : index + 2]
        return self[data][start:stop].tobytes()

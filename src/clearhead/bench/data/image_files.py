"""Opening pictures and masks, from files or packed end to end in an .npz."""

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


def open_rgb(source: Path | bytes, name: str = "") -> Any:
    """A PIL picture as it is stored. Not turned by its camera's flag: boxes and masks were drawn on what is stored."""
    from PIL import Image

    from clearhead.adapters.readers.image import in_colour

    return _opened(lambda file: in_colour(Image.open(file)), source, name)


def open_levels(source: Path | bytes, name: str = "") -> UInt8[np.ndarray, "height width"]:
    """A picture of numbers (a trimap, a class a pixel): palettes are left as they are."""
    from PIL import Image

    levels = _opened(lambda file: np.asarray(Image.open(file)), source, name)
    if levels.ndim != 2:
        raise InputError(f"{name or str(source)!r} is no map of one number a pixel, but has the shape {levels.shape}")
    return levels


def _opened(how: Callable[[Any], Any], source: Path | bytes, name: str) -> Any:
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    name = name or repr(str(source))
    try:
        return how(file)
    except FileNotFoundError:
        raise InputError(f"there is no picture {name}: is the data set unpacked completely?") from None
    except (OSError, ValueError, SyntaxError, EOFError) as problem:
        raise InputError(f"{name} is not a picture that can be opened ({problem})") from None


@dataclass(frozen=True)
class Packed:
    """An .npz whose large arrays stay on disk. Another process opens it for itself."""

    path: Path

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        try:
            with ZipFile(self.path) as archive:
                return {info.filename.removesuffix(".npy"): self._array(archive, info) for info in archive.infolist()}
        except (BadZipFile, ValueError) as problem:
            raise InputError(f"{str(self.path)!r} is not an .npz that can be read ({problem})") from None

    def _array(self, archive: ZipFile, info: Any) -> np.ndarray:
        """The array in place where it is stored as it is, else read."""
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = header(member)
            start = member.tell()
            if info.compress_type != ZIP_STORED or fortran or dtype.hasobject or 0 in shape:
                with np.load(self.path) as whole:
                    return np.asarray(whole[info.filename.removesuffix(".npy")])
        with self.path.open("rb") as file:  # the member begins after its local header, whose length varies
            file.seek(info.header_offset + 26)
            name, extra = struct.unpack("<HH", file.read(4))
        start += info.header_offset + 30 + name + extra
        return np.memmap(self.path, dtype=dtype, mode="r", offset=start, shape=shape)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise InputError(f"{str(self.path)!r} holds no {name!r}, but {', '.join(self.arrays)}")
        return self.arrays[name]

    def member(self, place: int, data: str = "data", offsets: str = "off") -> bytes:
        """One of the files that lie end to end."""
        start, stop = self[offsets][place : place + 2]
        return self[data][start:stop].tobytes()

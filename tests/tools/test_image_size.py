"""Sizes of images: every pinned package is counted, and a wheel and a base are weighed as they are."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from tools import image_size


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_every_pinned_package_is_counted(variant: str) -> None:
    text = image_size.image_requirements(variant)
    assert len(image_size.PACKAGE.findall(text)) == text.count("==") > 70


def test_a_wheel_that_the_index_lacks_is_weighed_where_it_lies(tmp_path: Path) -> None:
    wheel = tmp_path / "some_package-1.0+cpu-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("module.py", "x" * 5000)
        archive.writestr("other.py", "y" * 3000)
    packed, unpacked = image_size.wheel_sizes("some-package", "1.0+cpu", "0" * 64, [tmp_path])
    assert (packed, unpacked) == (wheel.stat().st_size, 8000)


def test_a_base_is_compressed_with_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "noise").write_bytes(os.urandom(20_000))
    (tmp_path / "zeros").write_bytes(bytes(50_000))
    (tmp_path / "link").symlink_to("zeros")
    packed, unpacked = image_size.base_sizes(tmp_path)
    assert unpacked == 70_000
    assert 20_000 < packed < 25_000

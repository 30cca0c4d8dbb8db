"""Readers of image datasets, on tiny files of every layout."""

import io
import json
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clearhead.bench.data import (
    EvidenceMask,
    Example,
    ImageBox,
    compute_soft_scores,
    find_evidence_units,
    load_benchmark_dataset,
)
from clearhead.bench.data.coco import _decode_compressed_runs, decode_outline
from clearhead.bench.data.image_files import NpzArchive, open_label_map, open_rgb_image
from clearhead.bench.data.imagenet_segmentation import _open_hdf5
from clearhead.bench.protocols.detection_masks import _list_true_instances
from clearhead.errors import InputError
from clearhead.units import build_patch_units


def pixels(seed: int, height: int = 64, width: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def pack_images(arrays: list[np.ndarray], image_format: str) -> tuple[np.ndarray, np.ndarray]:
    files = []
    for array in arrays:
        file = io.BytesIO()
        Image.fromarray(array).save(file, image_format, **({"lossless": True} if image_format == "WEBP" else {}))
        files.append(file.getvalue())
    offsets = np.cumsum([0, *map(len, files)])
    return np.frombuffer(b"".join(files), dtype=np.uint8), offsets


@pytest.mark.parametrize("save_npz", [np.savez, np.savez_compressed])
def test_npz_archive_equals_numpy_and_memory_maps_uncompressed(tmp_path: Path, save_npz: Any) -> None:
    arrays = {
        "data": np.arange(1000, dtype=np.uint8),
        "name": np.asarray(["a", "bcd"]),
        "box": np.arange(8, dtype=np.int16).reshape(2, 4),
        "none": np.zeros((0, 3)),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "off": np.asarray([0, 3, 5]),
    }
    save_npz(tmp_path / "x.npz", **arrays)
    pack = NpzArchive(tmp_path / "x.npz")
    for name, array in arrays.items():
        assert np.array_equal(pack[name], array) and pack[name].dtype == array.dtype
    assert isinstance(pack["data"], np.memmap) == (save_npz is np.savez)
    assert pack.read_member(1) == bytes([3, 4])
    assert len(pickle.dumps(pack)) < 300
    with pytest.raises(InputError, match="contains no 'mask'"):
        pack["mask"]
    (tmp_path / "y.npz").write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"not a readable .npz file"):
        NpzArchive(tmp_path / "y.npz")["data"]


def test_missing_and_invalid_images_raise(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no image .*unpacked completely"):
        open_rgb_image(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match="cannot be opened as an image"):
        open_rgb_image(tmp_path / "a.png")
    save(tmp_path / "a.png", pixels(0))
    with pytest.raises(InputError, match="one number per pixel"):
        open_label_map(tmp_path / "a.png")


def test_exif_orientation_is_ignored(tmp_path: Path) -> None:
    flag = Image.Exif()
    flag[0x0112] = 6
    Image.fromarray(pixels(0, 10, 20)).save(tmp_path / "a.jpg", exif=flag)
    assert open_rgb_image(tmp_path / "a.jpg").size == (20, 10)


def test_tiny_imagenet_packed_layout(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet"
    write(folder / "classes.tsv", "n1\tEgyptian cat\nn2\treel\n")
    for name, seeds in (("tin-val", [1, 2]), ("tin-train-0", [3]), ("tin-train-1", [4, 5])):
        data, off = pack_images([pixels(seed) for seed in seeds], "WEBP")
        box = np.asarray([[0, 0, 63, 31]] * len(seeds), dtype=np.int16)
        np.savez(folder / f"{name}.npz", data=data, off=off, label=np.arange(len(seeds), dtype=np.int16) % 2, box=box)
    data_set = load_benchmark_dataset("tiny-imagenet", root=tmp_path)
    assert data_set.split == "validation" and data_set.label_name(data_set[1].label) == "reel"
    assert np.array_equal(np.asarray(data_set[1].input), pixels(2))
    assert data_set[0].evidence == ((ImageBox((0.0, 0.0, 1.0, 0.5)),),)
    assert find_evidence_units(data_set[0], build_patch_units((2, 1))).tolist() == [True, False]
    train = pickle.loads(pickle.dumps(data_set.with_split("train")))
    assert [e.id for e in train] == ["train-000001", "train-000002", "train-000003"]
    assert np.array_equal(np.asarray(train[2].input), pixels(5))
    (folder / "classes.tsv").unlink()
    with pytest.raises(InputError, match=r"found no classes.tsv"):
        load_benchmark_dataset("tiny-imagenet", root=tmp_path)


def test_tiny_imagenet_published_layout(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-imagenet-200"
    write(folder / "wnids.txt", "n2\nn1\n")
    write(folder / "words.txt", "n1\treel\nn2\tEgyptian cat\nn3\tother\n")
    save(folder / "val" / "images" / "val_0.png", pixels(0))
    write(folder / "val" / "val_annotations.txt", "val_0.png\tn1\t0\t0\t63\t63\n")
    for wnid in ("n1", "n2"):
        save(folder / "train" / wnid / "images" / f"{wnid}_0.png", pixels(1))
        write(folder / "train" / wnid / f"{wnid}_boxes.txt", f"{wnid}_0.png\t16\t0\t31\t63\n")
    val = load_benchmark_dataset("tiny-imagenet", root=tmp_path)
    assert val.labels == ("Egyptian cat", "reel") and (val[0].id, val[0].label) == ("val_0", 1)
    assert [(e.id, e.label) for e in val.with_split("train")] == [("n2_0", 0), ("n1_0", 1)]
    assert val.with_split("train")[0].evidence == ((ImageBox((0.25, 0.0, 0.5, 1.0)),),)
    (folder / "train" / "n1" / "n1_boxes.txt").unlink()
    with pytest.raises(InputError, match=r"no file .*n1_boxes.txt'"):
        len(load_benchmark_dataset("tiny-imagenet", "train", root=tmp_path))
    write(folder / "val" / "val_annotations.txt", "val_0.png\tn9\t0\t0\t63\t63\n")
    with pytest.raises(InputError, match=r"unknown class in val_annotations.txt 'n9'"):
        len(load_benchmark_dataset("tiny-imagenet", root=tmp_path))
    (folder / "val" / "val_annotations.txt").unlink()
    with pytest.raises(InputError, match=r"found no val_annotations.txt"):
        len(load_benchmark_dataset("tiny-imagenet", root=tmp_path))


def make_trimap(height: int, width: int) -> np.ndarray:
    levels = np.full((height, width), 2, dtype=np.uint8)
    levels[:, : width // 2], levels[:, width // 2] = 1, 3
    return levels


def test_pets_packed_layout(tmp_path: Path) -> None:
    data, off = pack_images([pixels(1), pixels(2)], "WEBP")
    mask, moff = pack_images([make_trimap(64, 64), make_trimap(64, 64)], "PNG")
    both: Any = {"label": np.asarray([0, 1], dtype=np.int16), "species": np.asarray([0, 1], dtype=np.int8)}
    names = np.asarray(["Abyssinian_201", "american_bulldog_7"])
    (tmp_path / "pets").mkdir()
    np.savez(tmp_path / "pets" / "pets-test.npz", data=data, off=off, mask=mask, moff=moff, name=names, **both)
    pets = load_benchmark_dataset("pets", root=tmp_path)
    assert pets.labels == ("Abyssinian", "american bulldog") and pets.licence.startswith("CC BY-SA")
    assert [e.label for e in load_benchmark_dataset("pets", root=tmp_path, label="species")] == [0, 1]
    example = pickle.loads(pickle.dumps(pets))[1]
    assert example.id == "american_bulldog_7" and np.array_equal(np.asarray(example.input), pixels(2))
    assert find_evidence_units(example, build_patch_units((2, 2), special_names=["[CLS]"])).tolist() == [
        False,
        True,
        False,
        True,
        False,
    ]
    with pytest.raises(InputError, match="unknown label of a pet 'race'"):
        load_benchmark_dataset("pets", root=tmp_path, label="race")


def test_pets_published_layout(tmp_path: Path) -> None:
    folder = tmp_path / "oxford-iiit-pet"
    lines = "#Image CLASS-ID SPECIES BREED ID\nbeagle_1 2 2 1\nAbyssinian_201 1 1 1\n"
    write(folder / "annotations" / "test.txt", lines)
    for name in ("beagle_1", "Abyssinian_201"):
        save(folder / "images" / f"{name}.jpg", pixels(1, 40, 60))
        save(folder / "annotations" / "trimaps" / f"{name}.png", make_trimap(40, 60))
    pets = load_benchmark_dataset("pets", root=tmp_path)
    assert pets.labels == ("Abyssinian", "beagle") and [e.label for e in pets] == [1, 0]
    [[mask]] = pets[0].evidence or ()
    assert isinstance(mask, EvidenceMask) and mask.pixels.shape == (40, 60) and mask.pixels[:, :30].all()
    assert mask.ignored_pixels is not None and mask.ignored_pixels.sum() == 40
    save(folder / "annotations" / "trimaps" / "beagle_1.png", make_trimap(60, 40))
    with pytest.raises(InputError, match="the trimap is 40 × 60, but the image is 60 × 40"):
        pets[0]


XML = """<annotation><size><width>20</width><height>10</height></size>
<object><bndbox><xmin>0</xmin><ymin>0</ymin><xmax>10</xmax><ymax>10</ymax></bndbox></object>
<object><bndbox><xmin>15</xmin><ymin>5</ymin><xmax>25</xmax><ymax>10</ymax></bndbox></object></annotation>"""


def test_imagenet_folder_layout_with_boxes(tmp_path: Path) -> None:
    folder = tmp_path / "ILSVRC"
    save(folder / "Data" / "CLS-LOC" / "val" / "n02" / "b.png", pixels(0, 10, 20))
    save(folder / "Data" / "CLS-LOC" / "val" / "n01" / "c.PNG", pixels(1, 10, 20))
    save(folder / "Data" / "CLS-LOC" / "val" / "n01" / "a.png", pixels(2, 10, 20))
    write(folder / "LOC_synset_mapping.txt", "n01 tench, Tinca tinca\nn02 goldfish\n")
    write(folder / "Annotations" / "CLS-LOC" / "val" / "b.xml", XML)
    data = load_benchmark_dataset("imagenet", root=tmp_path)
    assert [e.id for e in data] == ["n01/a", "n01/c", "n02/b"] and data.labels == ("tench, Tinca tinca", "goldfish")
    assert data[2].evidence == ((ImageBox((0.0, 0.0, 0.5, 1.0)),), (ImageBox((0.75, 0.5, 1.0, 1.0)),))
    assert data[0].evidence is None and np.array_equal(np.asarray(data[0].input), pixels(2, 10, 20))


def test_image_folder_dataset_reads_splits_and_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        save(tmp_path / split / "cat" / f"{split}.png", pixels(0))
        save(tmp_path / split / "dog" / "x.png", pixels(1))
    data = load_benchmark_dataset(str(tmp_path))
    assert data.split == "validation" and data.labels == ("cat", "dog") and data[0].id == "cat/val"
    assert data.name == tmp_path.name and pickle.loads(pickle.dumps(data))[1].id == "dog/x"
    assert data.with_split("train")[0].id == "cat/train"
    save(tmp_path / "train" / "bat" / "x.png", pixels(1))
    assert load_benchmark_dataset(str(tmp_path)).labels == ("bat", "cat", "dog") and [
        e.label for e in load_benchmark_dataset(str(tmp_path))
    ] == [1, 2]
    assert [e.label for e in load_benchmark_dataset(str(tmp_path / "train"))] == [0, 1, 2]
    with pytest.raises(InputError, match="found no folders of classes"):
        load_benchmark_dataset(str(tmp_path / "train" / "cat"))
    write(tmp_path / "empty" / "cat" / "notes.txt", "")
    with pytest.raises(InputError, match=r"found no images \(.jpg"):
        len(load_benchmark_dataset(str(tmp_path / "empty")))


def encode_characters(word: str) -> np.ndarray:
    return np.asarray([[ord(character)] for character in word], dtype=np.uint16)


SEGMENTED = [("n02_1", "n02", 3), ("n01_7", "n01", 4)]


def fake_h5py() -> Any:
    """A fake h5py with numbers in place of HDF5 references, as in `file[file["value/img"][0, 0]]`."""
    content: dict[Any, np.ndarray] = {}

    def reference(array: np.ndarray) -> int:
        content[len(content)] = array
        return len(content) - 1

    columns: dict[str, list[int]] = {"img": [], "gt": [], "id": [], "target": []}
    for name, wnid, seed in SEGMENTED:
        columns["img"].append(reference(pixels(seed, 8, 6).transpose(2, 1, 0)))
        mask_reference = reference((np.arange(48).reshape(8, 6) % 6 < 3).astype(np.uint8).T)
        columns["gt"].append(reference(np.asarray([[mask_reference]])))
        columns["id"].append(reference(encode_characters(name)))
        columns["target"].append(reference(encode_characters(wnid)))
    content.update({f"value/{name}": np.asarray(refs)[:, None] for name, refs in columns.items()})
    return SimpleNamespace(File=lambda path, mode: content)


def assert_segmentation_dataset(root: Path) -> None:
    data = load_benchmark_dataset("imagenet-segmentation", root=root)
    assert data.labels == ("n01", "n02") and [(e.id, e.label) for e in data] == [("n02_1", 1), ("n01_7", 0)]
    assert np.array_equal(np.asarray(data[0].input), pixels(3, 8, 6))
    [[mask]] = data[0].evidence or ()
    assert isinstance(mask, EvidenceMask) and mask.pixels.shape == (8, 6) and mask.pixels[:, :3].all()
    assert mask.pixels.sum() == 24


def test_imagenet_segmentation_with_fake_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gtsegs_ijcv.mat").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    _open_hdf5.cache_clear()
    with pytest.raises(InputError, match=r"gtsegs_ijcv.mat needs the package h5py.*pip install h5py"):
        load_benchmark_dataset("imagenet-segmentation", root=tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", fake_h5py())
    assert_segmentation_dataset(tmp_path)
    assert len(load_benchmark_dataset("imagenet-segmentation", root=tmp_path / "gtsegs_ijcv.mat")) == 2
    _open_hdf5.cache_clear()


def test_imagenet_segmentation_from_hdf5_file(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py is not installed")
    _open_hdf5.cache_clear()
    with h5py.File(tmp_path / "gtsegs_ijcv.mat", "w") as file:
        references = {name: [] for name in ("img", "gt", "id", "target")}  # type: ignore[var-annotated]
        for name, wnid, seed in SEGMENTED:
            image = file.create_dataset(f"#refs#/{name}i", data=pixels(seed, 8, 6).transpose(2, 1, 0))
            mask = file.create_dataset(f"#refs#/{name}m", data=(np.arange(48).reshape(8, 6) % 6 < 3).T.astype("u1"))
            cell = file.create_dataset(f"#refs#/{name}c", (1, 1), dtype=h5py.ref_dtype)
            cell[0, 0] = mask.ref
            texts = [file.create_dataset(f"#refs#/{name}{w}", data=encode_characters(w)) for w in (name, wnid)]
            for key, reference in zip(references, (image, cell, *texts), strict=True):
                references[key].append(reference.ref)
        for key, column_references in references.items():
            column = file.create_dataset(f"value/{key}", (len(column_references), 1), dtype=h5py.ref_dtype)
            for index, reference in enumerate(column_references):
                column[index, 0] = reference
    assert_segmentation_dataset(tmp_path)
    _open_hdf5.cache_clear()
    (tmp_path / "gtsegs_ijcv.mat").write_bytes(b"no HDF5")
    with pytest.raises(InputError, match=r"not gtsegs_ijcv.mat in its published form"):
        load_benchmark_dataset("imagenet-segmentation", root=tmp_path)


def instances() -> dict[str, Any]:
    square = [[2, 1, 6, 1, 6, 5, 2, 5]]
    inside = np.zeros((8, 10), dtype=bool)
    inside[4:, 8:] = True
    flat = np.concatenate([[False], inside.T.ravel(), [not inside[-1, -1]]])
    counts = np.diff([0, *np.flatnonzero(flat[1:] != flat[:-1])]).tolist()
    size = {"height": 8, "width": 10}
    shared_fields = {"image_id": 7, "category_id": 18}
    return {
        "images": [{"id": 9, "file_name": "9.png", **size}, {"id": 7, "file_name": "7.png", **size}],
        "categories": [{"id": 18, "name": "dog"}, {"id": 1, "name": "person"}],
        "annotations": [
            {"id": 1, "image_id": 9, "category_id": 1, "iscrowd": 0, "segmentation": square},
            {"id": 3, **shared_fields, "iscrowd": 0, "segmentation": [[0, 0, 2, 0, 2, 2, 0, 2]]},
            {"id": 2, **shared_fields, "iscrowd": 0, "segmentation": square},
            {"id": 4, **shared_fields, "iscrowd": 1, "segmentation": {"size": [8, 10], "counts": counts}},
            {"id": 5, "image_id": 9, "category_id": 18, "iscrowd": 1, "segmentation": {"counts": counts}},
        ],
    }


def test_coco_instances_become_examples_with_crowds_ignored(tmp_path: Path) -> None:
    write(tmp_path / "coco" / "annotations" / "instances_val2017.json", json.dumps(instances()))
    with pytest.raises(InputError, match="found no folder of images val2017"):
        load_benchmark_dataset("coco", root=tmp_path)
    for name in ("7.png", "9.png"):
        save(tmp_path / "coco" / "val2017" / name, pixels(1, 8, 10))
    data = load_benchmark_dataset("coco", "validation", root=tmp_path)
    assert data.split == "val2017" and data.labels == ("person", "dog")
    assert [(e.id, e.label) for e in data] == [("7-18", 1), ("9-1", 0)]  # a crowd only is not an example
    assert pickle.loads(pickle.dumps(data))[1].id == "9-1"
    assert data[0].evidence is not None and len(data[0].evidence) == 2
    [mask] = data[0].evidence[0]
    assert isinstance(mask, EvidenceMask) and mask.ignored_pixels is not None and mask.ignored_pixels[4:, 8:].all()
    assert mask.ignored_pixels.sum() == 8 and mask.pixels[1:5, 2:6].all() and mask.pixels.sum() == 16
    save(tmp_path / "coco" / "val2017" / "7.png", pixels(1, 10, 10))
    with pytest.raises(InputError, match=r"7.png is 10 × 10, but 10 × 8 in the annotations"):
        data[0]
    write(tmp_path / "coco" / "annotations" / "instances_val2017.json", "[]")
    with pytest.raises(InputError, match="not a file of COCO instances"):
        load_benchmark_dataset("coco", root=tmp_path)


def test_data_sets_named_in_errors_of_protocols_can_be_loaded(tmp_path: Path) -> None:
    pytest.importorskip("clearhead_zoo")
    write(tmp_path / "coco" / "annotations" / "instances_val2017.json", json.dumps(instances()))
    for name in ("7.png", "9.png"):
        save(tmp_path / "coco" / "val2017" / name, pixels(1, 8, 10))
    with pytest.raises(InputError, match="has no object masks with classes") as raised:
        _list_true_instances(Example("1", "a text"))
    names = re.findall(r"\w+:[\w-]+", str(raised.value))
    assert len(names) == 2
    for name in names:
        assert _list_true_instances(load_benchmark_dataset(name, root=tmp_path)[0])
    reopened = load_benchmark_dataset("coco:image", root=tmp_path)
    assert reopened.open_other_split is not None and len(reopened.open_other_split("val2017")) == len(reopened) == 2
    with pytest.raises(InputError, match=r"unknown value for each= 'pictures'. Accepted: class, image"):
        load_benchmark_dataset("coco:pictures", root=tmp_path)


def test_rle_decodes_compressed_and_plain_counts() -> None:
    assert decode_outline({"counts": [1, 2, 1]}, 2, 2).tolist() == [[False, True], [True, False]]
    assert decode_outline({"counts": "121"}, 2, 2).tolist() == [[False, True], [True, False]]
    with pytest.raises(InputError, match="cover 3 pixels"):
        decode_outline({"counts": [1, 2]}, 2, 2)


@given(st.lists(st.tuples(st.floats(-2, 14), st.floats(-2, 12)), min_size=3, max_size=7), st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_outlines_equal_pycocotools(corners: list[tuple[float, float]], seed: int) -> None:
    api = pytest.importorskip("pycocotools.mask", reason="pycocotools is not installed")
    polygon = [float(round(x, 2)) for corner in corners for x in corner]
    expected = api.decode(api.frPyObjects([polygon], 9, 11))[..., 0].astype(bool)
    assert np.array_equal(decode_outline([polygon], 9, 11), expected)
    random = np.asfortranarray(np.random.default_rng(seed).random((37, 23)) < 0.1)
    packed_runs = api.encode(random.astype(np.uint8))["counts"]
    assert sum(_decode_compressed_runs(packed_runs)) == random.size
    assert np.array_equal(decode_outline({"counts": packed_runs.decode()}, 37, 23), random)


def test_vqa_soft_scores_by_rule(tmp_path: Path) -> None:
    folder = tmp_path / "vqa"
    questions = [
        {"question_id": 30, "image_id": 3, "question": "what colour?"},
        {"question_id": 20, "image_id": 3, "question": "how many?"},
    ]
    write(folder / "v2_OpenEnded_mscoco_val2014_questions.json", json.dumps({"questions": questions}))
    save(folder / "val2014" / "COCO_val2014_000000000003.jpg", pixels(1))
    with pytest.raises(InputError, match=r"found no v2_mscoco_val2014_annotations.json"):
        len(load_benchmark_dataset("vqa", root=tmp_path))
    annotations = [{"question_id": 30, "answers": [{"answer": "red"}] * 2 + [{"answer": "blue"}] * 8}]
    write(folder / "v2_mscoco_val2014_annotations.json", json.dumps({"annotations": annotations}))
    data = load_benchmark_dataset("vqa", "val", root=tmp_path)
    assert [e.id for e in data] == ["20", "30"] and data[0].label is None and data.labels == ()
    assert data[1].input["text"] == "what colour?" and data[1].input["image"].size == (64, 64)
    assert pickle.loads(pickle.dumps(data))[1].label == data[1].label
    assert data[1].label == {"blue": 1.0, "red": 2 / 3} and data.label_name(data[1].label) == "blue"
    assert load_benchmark_dataset("vqa", root=tmp_path, rule="official")[1].label == {"blue": 1.0, "red": 0.6}
    write(folder / "v2_OpenEnded_mscoco_test2015_questions.json", json.dumps({"questions": questions}))
    save(folder / "test2015" / "COCO_test2015_000000000003.jpg", pixels(1))
    assert data.with_split("test")[0].label is None
    with pytest.raises(InputError, match="unknown rule for answers"):
        load_benchmark_dataset("vqa", root=tmp_path, rule="halves")


@given(st.lists(st.sampled_from("abcd"), min_size=10, max_size=10))
def test_official_vqa_score_is_leave_one_out_mean(answers: list[str]) -> None:
    for answer, score in compute_soft_scores(answers, "official").items():
        others = [answers[:i] + answers[i + 1 :] for i in range(10)]
        assert score == pytest.approx(np.mean([min(rest.count(answer) / 3, 1) for rest in others]))
    assert compute_soft_scores(answers) == {a: min(answers.count(a) / 3, 1) for a in answers}

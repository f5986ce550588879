"""bert.py's model.safetensors, out and in."""
import json
import random

import pytest
import torch

import bert


@pytest.fixture
def saved(tmp_path, shards):
    """(a model, the folder that it was saved to)"""
    torch.manual_seed(0)
    model = bert.BertForPreTraining(bert.BertConfig(2, 64, 1, 128, vocab_size=320))
    bert.save_huggingface(model, shards / "tokenizer.model", tmp_path / "model", 64)
    return model, tmp_path / "model"


def assert_equal(found, expected, where):
    assert found.keys() == expected.keys(), f"{where}: other names"
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor.float()), f"{where}: {name} differs"


def test_safetensors_own_reader_finds_the_same(saved):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    _, folder = saved
    path = folder / "model.safetensors"
    found = safetensors.load_file(path)
    assert_equal(bert.unpack(bytearray(path.read_bytes())), found, "unpack")
    assert_equal(bert.unpack(bytearray(bert.pack(found))), found, "pack, then unpack")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_folder_of_save_pretrained_comes_back(saved, shards, tmp_path, dtype):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, folder = saved
    theirs = transformers.BertForPreTraining.from_pretrained(folder, dtype=dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    found = bert.load_huggingface(tmp_path / "theirs").state_dict()
    expected = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    assert_equal(found, expected, f"save_pretrained in {dtype}")


def damaged(content, how, rng):
    """Returns a file's bytes with something wrong in its header, or cut."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8:8 + size])
    entry = header["bert.pooler.dense.bias"]
    if how == "cut":
        return content[:rng.randrange(len(content))]
    if how == "length":
        return rng.getrandbits(64).to_bytes(8, "little") + content[8:]
    if how == "shape":
        entry["shape"] = rng.choice([[2 ** 40], [-1], [2 ** 62, 2 ** 62], ["a"], None, [0], [1e9]])
    if how == "offsets":
        entry["data_offsets"] = [rng.randrange(-2 ** 62, 2 ** 62), rng.randrange(2 ** 62)]
    if how == "moved":
        entry["data_offsets"][0] += 4
    if how == "format":
        entry["dtype"] = rng.choice(["F64", "F8_E4M3", "", None, 3])
    if how == "type":
        header = rng.choice([[1, 2], {"a": 1}, None, "x", 3])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size:]


@pytest.mark.parametrize(
    "how", ["cut", "length", "shape", "offsets", "moved", "format", "type"])
def test_a_damaged_header_is_one_line(saved, how):
    _, folder = saved
    path = folder / "model.safetensors"
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(30):
        path.write_bytes(damaged(content, how, rng))
        with pytest.raises(bert.ModelError, match="holds no model of this program as it") as raised:
            bert.load_huggingface(folder)
        assert "\n" not in str(raised.value), f"{how}: more than a line: {raised.value}"

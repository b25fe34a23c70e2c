"""Models of llama2.c say in transformers what they say in C: a forward pass in numpy, written from its equations."""

import lzma
import struct

import numpy as np
import pytest
import torch

from locant.hf import llama2c

DIM, HIDDEN, LAYERS, HEADS, VOCABULARY, LENGTH = 16, 24, 2, 4, 270, 12


def weights(kv: int, *, tied: bool) -> dict[str, np.ndarray]:
    """In the order of the file."""
    random, size = np.random.default_rng(0), DIM // HEADS
    shapes = {
        "tokens": (VOCABULARY, DIM), "norm1": (LAYERS, DIM), "wq": (LAYERS, DIM, DIM),
        "wk": (LAYERS, kv * size, DIM), "wv": (LAYERS, kv * size, DIM), "wo": (LAYERS, DIM, DIM),
        "norm2": (LAYERS, DIM), "w1": (LAYERS, HIDDEN, DIM), "w2": (LAYERS, DIM, HIDDEN), "w3": (LAYERS, HIDDEN, DIM),
        "norm": (DIM,), "cosines": (LENGTH, size // 2), "sines": (LENGTH, size // 2),
    }  # fmt: skip
    made = {name: random.normal(size=shape).astype(np.float32) * 0.5 for name, shape in shapes.items()}
    if not tied:
        made["out"] = random.normal(size=(VOCABULARY, DIM)).astype(np.float32)
    return made


def write(path, made, kv: int, *, tied: bool) -> bytes:
    data = struct.pack("7i", DIM, HIDDEN, LAYERS, HEADS, kv, VOCABULARY if tied else -VOCABULARY, LENGTH)
    data += b"".join(array.tobytes() for array in made.values())
    path.write_bytes(data)
    return data


def norm(x, weight):
    return x / np.sqrt((x * x).mean() + 1e-5) * weight


def turned(x, position):
    """Neighbours (x[i], x[i + 1]) turn by position / 10000^(i / size)."""
    out, size = x.copy(), len(x)
    for i in range(0, size, 2):
        angle = position / 10000 ** (i / size)
        c, s = np.cos(angle), np.sin(angle)
        out[i], out[i + 1] = x[i] * c - x[i + 1] * s, x[i] * s + x[i + 1] * c
    return out


def forward(made, kv: int, ids: list[int]) -> np.ndarray:
    size, logits = DIM // HEADS, []
    keys = [[[] for _ in range(kv)] for _ in range(LAYERS)]
    values = [[[] for _ in range(kv)] for _ in range(LAYERS)]
    for position, token in enumerate(ids):
        x = made["tokens"][token].astype(np.float64)
        for layer in range(LAYERS):
            h = norm(x, made["norm1"][layer])
            q, k, v = (made[name][layer] @ h for name in ("wq", "wk", "wv"))
            for group in range(kv):
                part = slice(group * size, (group + 1) * size)
                keys[layer][group].append(turned(k[part], position))
                values[layer][group].append(v[part])
            heads = []
            for head in range(HEADS):
                group = head // (HEADS // kv)
                query = turned(q[head * size : (head + 1) * size], position)
                score = np.array([query @ key for key in keys[layer][group]]) / np.sqrt(size)
                weight = np.exp(score - score.max())
                weight /= weight.sum()
                heads.append(sum(w * value for w, value in zip(weight, values[layer][group], strict=True)))
            x = x + made["wo"][layer] @ np.concatenate(heads)
            h = norm(x, made["norm2"][layer])
            gate = made["w1"][layer] @ h
            x = x + made["w2"][layer] @ (gate / (1 + np.exp(-gate)) * (made["w3"][layer] @ h))
        logits.append(made.get("out", made["tokens"]) @ norm(x, made["norm"]))
    return np.stack(logits)


@pytest.mark.parametrize(("kv", "tied"), [(4, True), (2, True), (4, False), (1, False)])
def test_it_says_what_the_c_program_says(tmp_path, kv, tied):
    made = weights(kv, tied=tied)
    write(tmp_path / "model.bin", made, kv, tied=tied)
    ids = [1, 17, 200, 5, 5, 91, 33]
    model = llama2c.load_model(tmp_path / "model.bin")
    with torch.no_grad():
        found = model(input_ids=torch.tensor([ids])).logits[0]
    np.testing.assert_allclose(found.numpy(), forward(made, kv, ids), rtol=2e-4, atol=2e-4)


def test_packed_files_and_files_that_are_none(tmp_path):
    data = write(tmp_path / "model.bin", weights(4, tied=True), 4, tied=True)
    with lzma.open(tmp_path / "model.bin.xz", "wb") as file:
        file.write(data)
    assert llama2c.load_model(tmp_path / "model.bin.xz").config.max_position_embeddings == LENGTH
    (tmp_path / "short.bin").write_bytes(data[:-4])
    with pytest.raises(ValueError, match=r"its header implies"):
        llama2c.load_model(tmp_path / "short.bin")
    (tmp_path / "none.bin").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"not a model of llama2\.c"):
        llama2c.load_model(tmp_path / "none.bin")


def words(path, pieces: list[str], *, bytes_as_text: bool) -> None:
    """A tokenizer of llama2.c: the pieces after the bytes, the earlier ones with the higher score."""
    entries = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
    entries += [(f"<0x{n:02X}>".encode() if bytes_as_text else bytes([n]), 0.0) for n in range(256)]
    entries += [(piece.encode(), -float(number)) for number, piece in enumerate(pieces)]
    body = b"".join(struct.pack("fi", score, len(piece)) + piece for piece, score in entries)
    path.write_bytes(struct.pack("i", max(len(piece) for piece, _ in entries)) + body)


@pytest.mark.parametrize("bytes_as_text", [True, False])
def test_the_tokenizer_merges_by_score_and_falls_back_to_bytes(tmp_path, bytes_as_text):
    pieces = ["he", "ll", " w", "hell", "hello", " ", "h", "e", "l", "o", "w", " hello"]
    words(tmp_path / "tokenizer.bin", pieces, bytes_as_text=bytes_as_text)
    tokenizer = llama2c.load_tokenizer(tmp_path / "tokenizer.bin")
    number = {piece: 259 + at for at, piece in enumerate(pieces)}
    assert tokenizer("hello")["input_ids"] == [1, number[" hello"]]
    assert tokenizer("hello w")["input_ids"] == [1, number[" hello"], number[" w"]]
    assert tokenizer("oé")["input_ids"] == [1, number[" "], number["o"], 3 + 0xC3, 3 + 0xA9]  # é is none of the pieces
    (tmp_path / "torn.bin").write_bytes((tmp_path / "tokenizer.bin").read_bytes()[:-3])
    (tmp_path / "odd.bin").write_bytes(struct.pack("ifi", 1, 0.0, -8))
    for name in ("torn.bin", "odd.bin"):
        with pytest.raises(ValueError, match="not a tokenizer"):
            llama2c.load_tokenizer(tmp_path / name)
    for text in ("hello w", "oé hell", "he  w"):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_the_command_writes_a_folder(tmp_path):
    import locant

    made = weights(4, tied=True)
    write(tmp_path / "model.bin", made, 4, tied=True)
    words(tmp_path / "tokenizer.bin", list("abcdefghijk"), bytes_as_text=True)
    llama2c.main(str(tmp_path / "model.bin"), str(tmp_path / "tokenizer.bin"), str(tmp_path / "out"))
    assert str(locant.native(locant.load(tmp_path / "out"))).startswith("rotary: rope:theta=10000,")

"""Samples of entries with states: recurrent nets, linear attention, causal convolution."""

from __future__ import annotations

import numpy as np

from tests.ops.samples import BF16, F16, F32, F64, rand, rows, sample


@rows("LSTM", "GRU", "RNN")
def _recurrent(op, opset):
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op.name]
    lstm = op.name == "LSTM"
    count = 3 if lstm else 2

    def given(dtype, steps, ways, bias, start, holes):
        """X, W, R and some of B, the states and the peepholes."""
        out = [
            rand((steps, 2, 4), dtype),
            rand((ways, gates * 3, 4), dtype, "w"),
            rand((ways, gates * 3, 3), dtype, "r"),
        ]
        out += [rand((ways, gates * 6), dtype, "b") if bias else None, None]
        out += [rand((ways, 2, 3), dtype, f"h{k}") if start else None for k in range(count - 1)]
        return [*out, rand((ways, 9), dtype, "p")] if holes else out

    for direction, ways in (("forward", 1), ("reverse", 1), ("bidirectional", 2)):
        attrs = {"hidden_size": 3, "direction": direction}
        for steps in (1, 3):
            for bias, start, holes in ((0, 0, 0), (1, 0, 0), (1, 1, 0), *([(1, 1, 1)] if lstm else [])):
                inputs = given(F32, steps, ways, bias, start, holes)
                for outputs in (1, count):
                    yield sample(*inputs, const=[1, 2, 3], outputs=outputs, may=steps > 1, **attrs)
    for dtype in (F64, F16, BF16):
        yield sample(*given(dtype, 1, 1, 1, 1, 0), const=[1, 2, 3], outputs=count, may=True, hidden_size=3)
    inputs = given(F32, 1, 1, 1, 0, 0)
    full, lengths = np.array([1, 1], np.int32), np.array([1, 0], np.int32)
    yield sample(*inputs[:4], full, const=[1, 2, 3, 4], outputs=count, hidden_size=3)
    yield sample(*inputs[:4], lengths, const=[1, 2, 3], outputs=count, may=True, hidden_size=3)
    yield sample(*inputs, const=[1, 2, 3], outputs=count, may=True, hidden_size=3, clip=0.5)


@rows("LinearAttention")
def _linear_attention(op, opset):
    for rule in ("linear", "gated", "delta", "gated_delta"):
        for heads, shared in ((2, 2), (4, 2), (2, 1)):
            for tokens in (1, 3):
                for past in (0, 1):
                    for dtype in (F32, F16):
                        decays = (shared * 4, shared) if "gated" in rule else (None,)
                        for decay in decays:
                            yield sample(
                                rand((2, tokens, heads * 4), dtype),
                                rand((2, tokens, shared * 4), dtype, "k", -0.5, 0.5),
                                rand((2, tokens, shared * 5), dtype, "v"),
                                rand((2, shared, 4, 5), dtype, "past") if past else None,
                                None if decay is None else rand((2, tokens, decay), dtype, "g", -2, 0),
                                rand((2, tokens, shared), dtype, "beta", 0, 1) if "delta" in rule else None,
                                outputs=2,
                                may=dtype != F32,
                                q_num_heads=heads,
                                kv_num_heads=shared,
                                update_rule=rule,
                            )


@rows("CausalConvWithState")
def _causal_conv(op, opset):
    for width in (1, 2, 4):
        for length in (1, 2, 7):
            for bias in (0, 1):
                for past in (0, 1):
                    for dtype in (F32, F16):
                        yield sample(
                            rand((2, 3, length), dtype),
                            rand((3, 1, width), dtype, "w"),
                            rand((3,), dtype, "b") if bias else None,
                            rand((2, 3, width - 1), dtype, "past") if past else None,
                            const=[1],
                            outputs=2,
                            may=dtype != F32,
                            **({"activation": "silu"} if bias else {}),
                        )

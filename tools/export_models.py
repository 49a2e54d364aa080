"""Export one transformers model with random weights to ONNX. Runs in any interpreter that has torch and transformers.

    python tools/export_models.py ENTRY OUT.onnx

Weights: seed 0, eager attention. The TorchScript exporter (dynamo=False, opset 17) is used where it can be, since
most files in the field come from it; the newer one where the model says so. The chosen exporter is printed.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import transformers as hf


@dataclass(frozen=True)
class Export:
    """A model, the inputs to trace it with, and which dimensions stay symbolic."""

    model: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    outputs: tuple[str, ...]
    dynamic: dict[str, dict[int, str]] | None = None
    dynamo: bool = False


class Outputs(torch.nn.Module):
    """Calls a transformers model with positional inputs and returns the named fields of what it gives."""

    def __init__(
        self, model: torch.nn.Module, inputs: tuple[str, ...], outputs: tuple[str, ...], **fixed: object
    ) -> None:
        super().__init__()
        self.model = model
        self.inputs, self.outputs, self.fixed = inputs, outputs, fixed

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.model(**dict(zip(self.inputs, values, strict=True)), **self.fixed)
        return tuple(result[name] for name in self.outputs)


def _wrap(model: torch.nn.Module, inputs: dict[str, torch.Tensor], *outputs: str, **fixed: object) -> Export:
    return Export(Outputs(model.eval(), tuple(inputs), outputs, **fixed).eval(), inputs, outputs)


def _image(size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 3, size, size)}


def bert_base() -> Export:
    """BERT-base, sequence 128, all shapes static."""
    config = hf.BertConfig(attn_implementation="eager")
    ids = torch.randint(0, config.vocab_size, (1, 128))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return _wrap(hf.BertModel(config), inputs, "last_hidden_state", "pooler_output")


def bert_base_dynamic() -> Export:
    """BERT-base with symbolic batch and sequence."""
    static = bert_base()
    axes = {0: "batch", 1: "sequence"}
    ids = {name: value[:, :37].repeat(2, 1) for name, value in static.inputs.items()}
    dynamic = dict.fromkeys(ids, axes) | {"last_hidden_state": axes, "pooler_output": {0: "batch"}}
    return Export(static.model, ids, static.outputs, dynamic)


def vit_small() -> Export:
    """ViT-small/16, 224x224."""
    config = hf.ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, attn_implementation="eager")
    return _wrap(hf.ViTForImageClassification(_labels(config)), _image(224), "logits")


def convnext_tiny() -> Export:
    """ConvNeXt-tiny, 224x224."""
    config = hf.ConvNextConfig(depths=[3, 3, 9, 3], hidden_sizes=[96, 192, 384, 768])
    return _wrap(hf.ConvNextForImageClassification(_labels(config)), _image(224), "logits")


def segformer_b0() -> Export:
    """SegFormer-b0, 256x256, 150 classes."""
    config = hf.SegformerConfig(num_labels=150, attn_implementation="eager")
    return _wrap(hf.SegformerForSemanticSegmentation(config), _image(256), "logits")


def mobilenet_v2() -> Export:
    """MobileNetV2 1.0, 224x224."""
    return _wrap(hf.MobileNetV2ForImageClassification(_labels(hf.MobileNetV2Config())), _image(224), "logits")


def resnet18() -> Export:
    """ResNet-18, 224x224."""
    config = hf.ResNetConfig(
        layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], embedding_size=64
    )
    return _wrap(hf.ResNetForImageClassification(_labels(config)), _image(224), "logits")


def gpt2_6l() -> Export:
    """GPT-2 with 6 layers, sequence 64, no cache. Its mask needs aten::diff, which only the newer exporter knows."""
    config = hf.GPT2Config(n_layer=6, attn_implementation="eager", use_cache=False)
    inputs = {"input_ids": torch.randint(0, config.vocab_size, (1, 64))}
    return replace(_wrap(hf.GPT2LMHeadModel(config), inputs, "logits", use_cache=False), dynamo=True)


def _labels(config: hf.PretrainedConfig) -> hf.PretrainedConfig:
    config.num_labels = 1000
    return config


ENTRIES: dict[str, Callable[[], Export]] = {
    f.__name__: f
    for f in (bert_base, bert_base_dynamic, vit_small, convnext_tiny, segformer_b0, mobilenet_v2, resnet18, gpt2_6l)
}


def export(entry: str, path: str) -> str:
    """Export and say how."""
    torch.manual_seed(0)
    job = ENTRIES[entry]()
    _settle(job.model)
    args = tuple(job.inputs.values())
    names = {"input_names": list(job.inputs), "output_names": list(job.outputs)}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if job.dynamo:
            torch.onnx.export(job.model, args, path, **names, dynamo=True, opset_version=18, external_data=False)
            return "dynamo=True, opset 18"
        torch.onnx.export(job.model, args, path, **names, dynamo=False, opset_version=17, dynamic_axes=job.dynamic)
        return "dynamo=False, opset 17"


def _settle(model: torch.nn.Module) -> None:
    """Draw biases, norms and layer scales too: zeros and ones hide mistakes, and the exporter would merge them."""
    for name, parameter in model.named_parameters():
        if parameter.dim() != 1:
            continue
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.05)
        elif name.endswith("layer_scale_parameter"):
            torch.nn.init.uniform_(parameter, 0.1, 0.3)
        else:
            torch.nn.init.uniform_(parameter, 0.8, 1.2)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.running_var, 0.6, 1.4)
            torch.nn.init.normal_(module.running_mean, 0.0, 0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entry", choices=sorted(ENTRIES))
    parser.add_argument("path")
    args = parser.parse_args()
    print(f"{args.entry}: exported with {export(args.entry, args.path)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

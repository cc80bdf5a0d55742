"""What we know of each supported base: its attention class, where its projections are, its heads, its parts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers.models.albert.modeling_albert import AlbertAttention
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.deit.modeling_deit import DeiTAttention
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.distilbert.modeling_distilbert import DistilBertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.modernbert.modeling_modernbert import ModernBertAttention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention
from transformers.models.vit.modeling_vit import ViTAttention


@dataclass(frozen=True)
class Parts:
    """Names of a base model's children."""

    layers: str
    embeddings: tuple[str, ...]
    norm: str
    rope: str | None


@dataclass(frozen=True)
class Architecture:
    """A supported base: its attention class, the prefix of its class names, what its projections are for, its parts.

    Attributes:
        projections: path from the attention module -> which of q, k, v, o it computes; `../` is the module around it.
        parts: children of the base model: its layers, what comes before and after them, and what holds RoPE's angles;
            None for encoders, of which nobody wants a few layers alone.
        heads: Auto class -> how the model class is called behind the prefix; those that the base lacks are left out.
    """

    attention: type[nn.Module]
    prefix: str
    projections: dict[str, str]
    parts: Parts | None
    heads: dict[str, tuple[str, ...]]

    @property
    def bidirectional(self) -> bool:
        """Whether every token sees those behind it too."""
        return self.parts is None


# gpt2 calls its language model head differently.
HEADS = {
    "AutoModel": ("Model",),
    "AutoModelForCausalLM": ("ForCausalLM", "LMHeadModel"),
    "AutoModelForSequenceClassification": ("ForSequenceClassification",),
    "AutoModelForTokenClassification": ("ForTokenClassification",),
}
TEXT_HEADS = {
    "AutoModel": ("Model",),
    "AutoModelForMaskedLM": ("ForMaskedLM",),
    "AutoModelForSequenceClassification": ("ForSequenceClassification",),
    "AutoModelForTokenClassification": ("ForTokenClassification",),
    "AutoModelForMultipleChoice": ("ForMultipleChoice",),
    "AutoModelForQuestionAnswering": ("ForQuestionAnswering",),
}
VISION_HEADS = {"AutoModel": ("Model",), "AutoModelForImageClassification": ("ForImageClassification",)}

_SEPARATE = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
_BERT = {"query": "q", "key": "k", "value": "v", "../output.dense": "o"}
_ALBERT = {"query": "q", "key": "k", "value": "v", "dense": "o"}
_DISTILBERT = {"q_lin": "q", "k_lin": "k", "v_lin": "v", "out_lin": "o"}
_PARTS = Parts("layers", ("embed_tokens",), "norm", "rotary_emb")
_GPT2_PARTS = Parts("h", ("wte", "wpe"), "ln_f", None)
# DINOv2's projections came to be called as ViT's are.
_OLD_DINOV2: type[nn.Module] | None = getattr(modeling_dinov2, "Dinov2SelfAttention", None)
_DINOV2 = (modeling_dinov2.Dinov2Attention, _SEPARATE) if _OLD_DINOV2 is None else (_OLD_DINOV2, _BERT)

ARCHITECTURES = {
    "llama": Architecture(LlamaAttention, "Llama", _SEPARATE, _PARTS, HEADS),
    "mistral": Architecture(MistralAttention, "Mistral", _SEPARATE, _PARTS, HEADS),
    "qwen3": Architecture(Qwen3Attention, "Qwen3", _SEPARATE, _PARTS, HEADS),
    "gpt2": Architecture(GPT2Attention, "GPT2", {"c_attn": "qkv", "c_proj": "o"}, _GPT2_PARTS, HEADS),
    "bert": Architecture(BertSelfAttention, "Bert", _BERT, None, TEXT_HEADS),
    "roberta": Architecture(RobertaSelfAttention, "Roberta", _BERT, None, TEXT_HEADS),
    "distilbert": Architecture(DistilBertSelfAttention, "DistilBert", _DISTILBERT, None, TEXT_HEADS),
    "albert": Architecture(AlbertAttention, "Albert", _ALBERT, None, TEXT_HEADS),
    "modernbert": Architecture(ModernBertAttention, "ModernBert", {"Wqkv": "qkv", "Wo": "o"}, None, TEXT_HEADS),
    "vit": Architecture(ViTAttention, "ViT", _SEPARATE, None, VISION_HEADS),
    "deit": Architecture(DeiTAttention, "DeiT", _SEPARATE, None, VISION_HEADS),
    "dinov2": Architecture(_DINOV2[0], "Dinov2", _DINOV2[1], None, VISION_HEADS),
}

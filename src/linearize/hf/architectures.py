"""Supported architectures: the attention class of each, its projections, its parts and its heads."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.models.albert.modeling_albert import AlbertAttention
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.deit.modeling_deit import DeiTAttention
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.distilbert.modeling_distilbert import DistilBertSelfAttention
from transformers.models.gemma.modeling_gemma import GemmaAttention
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.granite.modeling_granite import GraniteAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.mixtral.modeling_mixtral import MixtralAttention
from transformers.models.modernbert.modeling_modernbert import ModernBertAttention
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention
from transformers.models.opt.modeling_opt import OPTAttention
from transformers.models.phi.modeling_phi import PhiAttention
from transformers.models.phi3.modeling_phi3 import Phi3Attention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention
from transformers.models.vit.modeling_vit import ViTAttention

_WINDOW_MASKS = ("sliding_window_causal", "bidirectional_sliding_window")  # functions of transformers that make them


@dataclass(frozen=True)
class Parts:
    """Paths from a base model to its parts.

    Attributes:
        layers: the list of layers; its parent module runs them.
        embeddings: of tokens and of positions.
        norm: after the last layer.
        rope: module with the angles of RoPE.
        entry: module between embeddings and the first layer, in some models of this architecture.
        exit: module after the norm, in some models of this architecture.
        multiplier: attribute of the base model that scales embeddings.
    """

    layers: str = "layers"
    embeddings: tuple[str, ...] = ("embed_tokens",)
    norm: str = "norm"
    rope: str | None = "rotary_emb"
    entry: str | None = None
    exit: str | None = None
    multiplier: str | None = None

    @property
    def stack(self) -> str:
        """Return the path of the module that runs the layers; empty for the base model itself."""
        return self.layers.rpartition(".")[0]


@dataclass(frozen=True)
class Architecture:
    """A supported base model: its attention class, projections and parts.

    Attributes:
        projections: path from the attention module -> which of q, k, v, o it computes; `../` is the parent module.
        parts: paths to the base model's parts; None for encoders, which are never split into layers.
        forgets_positions: the base makes its causal mask without position ids, which separate packed documents; see
            `linearize.hf.layouts.keep_documents_apart`.
    """

    attention: type[nn.Module]
    projections: dict[str, str]
    parts: Parts | None
    forgets_positions: bool = False

    @property
    def bidirectional(self) -> bool:
        """Return whether every token attends to later tokens too."""
        return self.parts is None

    @property
    def slides(self) -> bool:
        """Return whether layers can have sliding windows. If not, `sliding_window` in a config has no effect."""
        module = sys.modules[self.attention.__module__]
        return any(hasattr(module, f"create_{mask}_mask") for mask in _WINDOW_MASKS)

    @property
    def slides_by_layer(self) -> bool:
        """Return whether `layer_types` chooses the layers with sliding windows. If not, it has no effect."""
        return self.slides and "layer_types" in self.attention.__init__.__code__.co_names


# The Auto classes that make and load models; no base has them all. If two of them make the same class, checkpoints name
# the first one.
DECODER_HEADS = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForPreTraining",
)
ENCODER_HEADS = (
    "AutoModel",
    "AutoModelForMaskedLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForMultipleChoice",
    "AutoModelForQuestionAnswering",
    "AutoModelForNextSentencePrediction",
    "AutoModelForPreTraining",
    "AutoModelForTextEncoding",
    "AutoModelForImageClassification",
    "AutoModelForMaskedImageModeling",
)

_SEPARATE = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
_BERT = {"query": "q", "key": "k", "value": "v", "../output.dense": "o"}
_ALBERT = {"query": "q", "key": "k", "value": "v", "dense": "o"}
_DISTILBERT = {"q_lin": "q", "k_lin": "k", "v_lin": "v", "out_lin": "o"}
_FUSED = {"qkv_proj": "qkv", "o_proj": "o"}
_PHI = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "dense": "o"}
_GPT_NEOX = {"query_key_value": "qkv", "dense": "o"}
_OPT = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "out_proj": "o"}
_PARTS = Parts()
_GPT2_PARTS = Parts("h", ("wte", "wpe"), "ln_f", None)
_GPT_NEOX_PARTS = Parts(embeddings=("embed_in",), norm="final_layer_norm")
_OPT_PARTS = Parts(
    "decoder.layers",
    ("decoder.embed_tokens", "decoder.embed_positions"),
    "decoder.final_layer_norm",
    rope=None,
    entry="decoder.project_in",
    exit="decoder.project_out",
)
# Newer versions of transformers name DINOv2's projections like ViT's.
_OLD_DINOV2: type[nn.Module] | None = getattr(modeling_dinov2, "Dinov2SelfAttention", None)
_DINOV2 = (modeling_dinov2.Dinov2Attention, _SEPARATE) if _OLD_DINOV2 is None else (_OLD_DINOV2, _BERT)

ARCHITECTURES = {
    "llama": Architecture(LlamaAttention, _SEPARATE, _PARTS),
    "mistral": Architecture(MistralAttention, _SEPARATE, _PARTS),
    "qwen3": Architecture(Qwen3Attention, _SEPARATE, _PARTS),
    "gpt2": Architecture(GPT2Attention, {"c_attn": "qkv", "c_proj": "o"}, _GPT2_PARTS),
    "mixtral": Architecture(MixtralAttention, _SEPARATE, _PARTS),
    "qwen2": Architecture(Qwen2Attention, _SEPARATE, _PARTS),
    "qwen3_moe": Architecture(Qwen3MoeAttention, _SEPARATE, _PARTS),
    "gemma": Architecture(GemmaAttention, _SEPARATE, _PARTS),
    "gemma2": Architecture(Gemma2Attention, _SEPARATE, _PARTS),
    "gemma3_text": Architecture(Gemma3Attention, _SEPARATE, _PARTS),
    "phi": Architecture(PhiAttention, _PHI, Parts(norm="final_layernorm")),
    "phi3": Architecture(Phi3Attention, _FUSED, _PARTS),
    "gpt_neox": Architecture(GPTNeoXAttention, _GPT_NEOX, _GPT_NEOX_PARTS),
    "opt": Architecture(OPTAttention, _OPT, _OPT_PARTS, forgets_positions=True),
    "olmo2": Architecture(Olmo2Attention, _SEPARATE, _PARTS),
    "smollm3": Architecture(SmolLM3Attention, _SEPARATE, _PARTS),
    "granite": Architecture(GraniteAttention, _SEPARATE, Parts(multiplier="embedding_multiplier")),
    "bert": Architecture(BertSelfAttention, _BERT, None),
    "roberta": Architecture(RobertaSelfAttention, _BERT, None),
    "distilbert": Architecture(DistilBertSelfAttention, _DISTILBERT, None),
    "albert": Architecture(AlbertAttention, _ALBERT, None),
    "modernbert": Architecture(ModernBertAttention, {"Wqkv": "qkv", "Wo": "o"}, None),
    "vit": Architecture(ViTAttention, _SEPARATE, None),
    "deit": Architecture(DeiTAttention, _SEPARATE, None),
    "dinov2": Architecture(_DINOV2[0], _DINOV2[1], None),
}


def architecture_of(model: Any) -> Architecture | None:
    """Return the architecture of a model or of an attention module, softmax or linearized; None if not supported."""
    return ARCHITECTURES.get(model.config.model_type.removeprefix("linearized_"))


def drops_soft_cap(config: PreTrainedConfig) -> bool:
    """Return whether a model's attention ignores its soft cap: SDPA has none, and old transformers do not check."""
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return capped and config._attn_implementation == "sdpa"

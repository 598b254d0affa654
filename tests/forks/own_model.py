"""A model of one's own: the module that such a fork has beside train.py, which imports it and changes nothing else.

As a PreTrainedModel that transformers knows by its model_type, it is planned, checked, sharded, saved and exported like
any other: model.architecture: {model_type: own_gpt, hidden_size: 64}.

post_init() draws all weights anew, as _init_weights() says, which a model may define. So what __init__() draws before
has no effect. An output layer with the weight of the embedding needs more than that line of code: in the class
_tied_weights_keys = {"head.weight": "tokens.weight"}, and in the config tie_word_embeddings: bool = True.
"""

import torch
import torch.nn.functional as F
import transformers
from transformers.modeling_outputs import CausalLMOutput


class OwnConfig(transformers.PreTrainedConfig):
    model_type = "own_gpt"

    vocab_size: int = 384
    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_position_embeddings: int = 64


class Layer(torch.nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, states: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
        """states: [rows, tokens, width]. is_seen: [rows, 1, tokens, tokens]."""
        heads = self.qkv(self.attention_norm(states)).unflatten(2, (3 * self.heads, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, dim=1), attn_mask=is_seen)
        states = states + self.out(attended.transpose(1, 2).flatten(2))
        return states + self.down(F.gelu(self.up(self.mlp_norm(states))))


class OwnModel(transformers.PreTrainedModel, transformers.GenerationMixin):
    config_class = OwnConfig
    _no_split_modules = ["Layer"]  # What FSDP2 shards one by one.
    _supports_sdpa = True

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        width = config.hidden_size
        self.tokens = torch.nn.Embedding(config.vocab_size, width)
        self.positions = torch.nn.Embedding(config.max_position_embeddings, width)
        self.layers = torch.nn.ModuleList(
            Layer(width, config.num_attention_heads) for _ in range(config.num_hidden_layers)
        )
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, **options) -> CausalLMOutput:
        """A token sees those before it in its document. Each document of a row has positions from 0."""
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).expand_as(input_ids)
        document = (position_ids == 0).cumsum(1)
        is_before = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        is_seen = is_before & (document[:, :, None] == document[:, None, :])
        states = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            states = layer(states, is_seen[:, None])
        return CausalLMOutput(logits=self.head(self.norm(states)))


transformers.AutoConfig.register(OwnConfig.model_type, OwnConfig)
transformers.AutoModelForCausalLM.register(OwnConfig, OwnModel)

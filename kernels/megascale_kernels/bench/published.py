# SPDX-License-Identifier: Apache-2.0
"""Hidden and inner sizes of published models' MLPs, as each model's `config.json` has them (or its `text_config`).

Of a mixture of experts it is one expert's inner size, or where the name says so that of the dense layers.
"""

from typing import NamedTuple


class Model(NamedTuple):
    """One MLP.

    Attributes:
        name: in a table.
        hidden: `hidden_size` (`d_model`).
        inner: `intermediate_size` (`ffn_dim`, `ffn_hidden_size`).
        source: the repository whose `config.json` says so.
    """

    name: str
    hidden: int
    inner: int
    source: str


MODELS = (
    Model("Llama-3.2-1B", 2048, 8192, "meta-llama/Llama-3.2-1B"),
    Model("Llama-3.2-3B", 3072, 8192, "meta-llama/Llama-3.2-3B"),
    Model("Llama-2-7B", 4096, 11008, "meta-llama/Llama-2-7b-hf"),
    Model("Llama-3.1-8B", 4096, 14336, "meta-llama/Llama-3.1-8B"),
    Model("Llama-2-13B", 5120, 13824, "meta-llama/Llama-2-13b-hf"),
    Model("Llama-3.1-70B", 8192, 28672, "meta-llama/Llama-3.1-70B"),
    Model("Llama-3.1-405B", 16384, 53248, "meta-llama/Llama-3.1-405B"),
    Model("Mistral-Nemo-12B", 5120, 14336, "mistralai/Mistral-Nemo-Base-2407"),
    Model("Mistral-Small-24B", 5120, 32768, "mistralai/Mistral-Small-24B-Base-2501"),
    Model("Mistral-Large-123B", 12288, 28672, "mistralai/Mistral-Large-Instruct-2407"),
    Model("Mixtral-8x22B", 6144, 16384, "mistralai/Mixtral-8x22B-v0.1"),
    Model("Qwen2.5-1.5B", 1536, 8960, "Qwen/Qwen2.5-1.5B"),
    Model("Qwen2.5-3B", 2048, 11008, "Qwen/Qwen2.5-3B"),
    Model("Qwen2.5-7B", 3584, 18944, "Qwen/Qwen2.5-7B"),
    Model("Qwen2.5-32B", 5120, 27648, "Qwen/Qwen2.5-32B"),
    Model("Qwen2.5-72B", 8192, 29568, "Qwen/Qwen2.5-72B"),
    Model("Qwen1.5-110B", 8192, 49152, "Qwen/Qwen1.5-110B"),
    Model("Qwen3-4B", 2560, 9728, "Qwen/Qwen3-4B"),
    Model("Qwen3-8B", 4096, 12288, "Qwen/Qwen3-8B"),
    Model("Qwen3-14B", 5120, 17408, "Qwen/Qwen3-14B"),
    Model("Qwen3-32B", 5120, 25600, "Qwen/Qwen3-32B"),
    Model("Gemma-2-2B", 2304, 9216, "google/gemma-2-2b"),
    Model("Gemma-2-9B", 3584, 14336, "google/gemma-2-9b"),
    Model("Gemma-2-27B", 4608, 36864, "google/gemma-2-27b"),
    Model("Gemma-3-27B", 5376, 21504, "google/gemma-3-27b-pt"),
    Model("Phi-4", 5120, 17920, "microsoft/phi-4"),
    Model("Yi-34B", 7168, 20480, "01-ai/Yi-34B"),
    Model("DeepSeek-67B", 8192, 22016, "deepseek-ai/deepseek-llm-67b-base"),
    Model("DeepSeek-V3-dense", 7168, 18432, "deepseek-ai/DeepSeek-V3"),
    Model("Command-R-35B", 8192, 22528, "CohereForAI/c4ai-command-r-v01"),
    Model("Command-R+-104B", 12288, 33792, "CohereForAI/c4ai-command-r-plus"),
    Model("StarCoder2-15B", 6144, 24576, "bigcode/starcoder2-15b"),
    Model("OPT-66B", 9216, 36864, "facebook/opt-66b"),
)

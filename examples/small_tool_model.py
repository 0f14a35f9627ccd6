"""Copy the small model of grpo_tools.py, with a chat template that shows tools and writes calls.

    python examples/small_tool_model.py FOLDER

checkpoints/tools-sft reads 512 tokens, and its own template shows no tools. This one writes only their names
and arguments, such as "play(number)". Otherwise, it writes calls as Qwen2.5 and Hermes do, so the data of
examples/tic_tac_toe.py and examples/search_tool.py also work with such models, which need no copy.
"""

import shutil
import sys
from pathlib import Path

from transformers import AutoTokenizer

MODEL = Path(__file__).resolve().parent.parent / "checkpoints/tools-sft"
TEMPLATE = """\
{%- if tools -%}
    {{- '<|im_start|>system' -}}
    {%- for tool in tools -%}
        {{- '\\n' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def copy_model(folder):
    """Copy the model, then save its tokenizer with the template."""
    shutil.copytree(MODEL, folder)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    copy_model(sys.argv[1])

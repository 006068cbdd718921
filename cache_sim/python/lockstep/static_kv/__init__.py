"""Qwen3 exported with fixed shapes: text_model.py is what is exported, export.py exports and packages it, runtime.py
takes the place of the original in transformers. `python -m lockstep.static_kv` is the command."""

"""Text in, text out: tokenizer, chat template, incremental detokenizer, stop strings.

Everything here is synchronous and touches no engine state, so that it may run in an executor thread.
"""

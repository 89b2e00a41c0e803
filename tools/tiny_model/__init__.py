"""Trains `dsserve-tiny`: data, tokenizer, quantisation-aware training, draft head, export and evaluation."""

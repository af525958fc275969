"""All metric families, declared once, with help, units, labels and buckets.

Our names start with `m3_`; what gateways, autoscalers and load tools read under vLLM's names is made of the same numbers at the
moment of a scrape. Every application has its own registry. Imports nothing else of ours: the server hands in numbers.
"""

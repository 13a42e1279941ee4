"""The steps of the flows: each calls the core, retries what a retry can help, and records what it
saw.
"""

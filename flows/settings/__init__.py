"""One settings model for each flow. Nothing here imports Prefect, so that the command line can use
them quickly.
"""

"""What each flow does, as a plain function of its settings.

The flow of the same name in `virnuc.flows` calls it within a run of Prefect. Where there is no
server, the command calls it without Prefect (`virnuc.flows.flow_body`), which nothing here imports.
"""

"""What each flow does, as a plain function of its settings.

The flow of the same name in `virnuc.flows` calls it within a run of Prefect. Nothing here needs
Prefect: where there is no server, the command calls the function itself.
"""

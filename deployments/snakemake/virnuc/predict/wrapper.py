"""Say which reads are viral: a Snakemake wrapper for `virnuc predict`.

The outputs are files of one folder, the run directory. Snakemake removes the outputs before it
starts a job again, but not the other files there. So virnuc continues an interrupted run.
"""

from pathlib import Path

from snakemake.shell import shell

NamedFiles = dict[str, str | list[str]]
# The outputs that a rule can name, and the file of the run directory that each one is.
FILES = {
    "reads": "reads.tsv",
    "pairs": "pairs.tsv",
    "summary": "summary.json",
    "page": "summary.html",
}
# Reads in the format of the input, with the option that asks for them.
READ_FILES = {
    "viral": ("viral", "--write-viral"),
    "nonviral": ("nonviral", "--write-nonviral"),
}


def check_file_name(output: str, file_name: str) -> None:
    """Raise an error if virnuc would not write the file of an output under this name."""
    if output in FILES:
        is_right = file_name == FILES[output]
    elif output in READ_FILES:
        stem, _ = READ_FILES[output]
        is_right = file_name.startswith((f"{stem}.fast", f"{stem}_"))
    else:
        known = ", ".join([*FILES, *READ_FILES])
        raise ValueError(f"virnuc has no output `{output}`. The outputs are: {known}.")
    if not is_right:
        raise ValueError(f"virnuc does not write the output `{output}` as {file_name}.")


def input_words(inputs: NamedFiles) -> list[str]:
    """Return the words of the command line that name the reads, and the files of mates.

    Raises:
        ValueError: The rule names no reads, or mates of one side only.
    """
    options = {"reads": "--reads", "mates_1": "--mates-1", "mates_2": "--mates-2"}
    named = [name for name in options if name in inputs]
    if not named or ("mates_1" in named) != ("mates_2" in named):
        raise ValueError("The rule needs the input `reads`, or `mates_1` and `mates_2`.")
    words = []
    for name in named:
        files = inputs[name]
        words += [options[name], *([files] if isinstance(files, str) else files)]
    return words


def run_directory(outputs: NamedFiles) -> Path:
    """Return the folder of all outputs.

    Raises:
        ValueError: An output has a name that virnuc does not use, or is in another folder.
    """
    if "reads" not in outputs:
        raise ValueError("The rule needs the output `reads`, for example reads='run/reads.tsv'.")
    folder = Path(str(outputs["reads"])).parent
    for name, files in outputs.items():
        paths = [files] if isinstance(files, str) else files
        for path in map(Path, paths):
            check_file_name(name, path.name)
            if path.parent != folder:
                raise ValueError(f"All outputs must be in one folder: {path} is not in {folder}.")
    return folder


inputs = input_words(dict(snakemake.input.items()))
outputs = dict(snakemake.output.items())
folder = run_directory(outputs)
options = [option for name, (_, option) in READ_FILES.items() if name in outputs]

models = snakemake.input.models
extra = snakemake.params.get("extra", "")
threads = snakemake.threads
log = snakemake.log_fmt_shell(stdout=True, stderr=True)

shell(
    "virnuc predict {inputs:q} --out {folder:q} --models {models:q}"
    " --no-prefect --no-progress --stage-workers {threads} {options} {extra} {log}"
)

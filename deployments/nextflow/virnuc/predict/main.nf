process VIRNUC_PREDICT {
    tag "$meta.id"
    label 'process_high'
    label 'process_gpu'

    conda "${moduleDir}/environment.yml"
    // Our image, as `make image` builds it: no image is in a public registry yet.
    container "${task.ext.container ?: 'virnuc:latest'}"
    // The image starts virnuc by itself, but Nextflow brings a script of its own.
    containerOptions "${workflow.containerEngine in ['singularity', 'apptainer'] ? '--nv' : workflow.containerEngine == 'docker' ? '--gpus all --entrypoint=' : ''}"

    input:
    tuple val(meta), path(reads)
    path models

    output:
    tuple val(meta), path("${prefix}/reads.tsv")      , emit: reads
    tuple val(meta), path("${prefix}/pairs.tsv")      , emit: pairs, optional: true
    tuple val(meta), path("${prefix}/summary.json")   , emit: summary
    tuple val(meta), path("${prefix}/summary.html")   , emit: page
    tuple val(meta), path("${prefix}/failed.tsv")     , emit: failed
    tuple val(meta), path("${prefix}/viral*.fast?.gz"), emit: viral, optional: true
    tuple val("${task.process}"), val('virnuc'), eval("virnuc --version | sed 's/virnuc //'"), topic: versions, emit: versions_virnuc

    when:
    task.ext.when == null || task.ext.when

    script:
    def args = task.ext.args ?: ''
    prefix = task.ext.prefix ?: "${meta.id}"
    def files = reads instanceof List ? reads : [reads]
    def pairs = !meta.single_end && files.size() == 2
    def input = pairs ? "--mates-1 ${files[0]} --mates-2 ${files[1]}" : "--reads ${files.join(' ')}"
    """
    # The image allows the folder /srv/virnuc alone. A task sees what Nextflow shows it, and nothing else.
    unset VIRNUC_ROOTS

    virnuc predict \\
        $input \\
        --out $prefix \\
        --models $models \\
        --stage-workers $task.cpus \\
        --no-prefect \\
        --no-progress \\
        $args
    """

    stub:
    def args = task.ext.args ?: ''
    prefix = task.ext.prefix ?: "${meta.id}"
    def files = reads instanceof List ? reads : [reads]
    def pairs = !meta.single_end && files.size() == 2 ? "${prefix}/pairs.tsv" : ''
    """
    echo $args
    mkdir $prefix
    touch $prefix/reads.tsv $prefix/summary.json $prefix/summary.html $prefix/failed.tsv $pairs
    """
}

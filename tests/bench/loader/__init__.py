"""Millstream's loader beside its peers on the same tars: `make bench-loader`, or `python -m tests.bench.loader OUT.md`.

    work.py         what every loader has to deliver, and the two decoders
    dataset.py      the tars
    contenders.py   the raw loop, Millstream, and torch's DataLoader over webdataset
    peers.py        Megatron-Energon, MosaicML Streaming, LitData, SPDL
    measure.py      one contender, one process: writes its figures as JSON
    environment.py  `.venv-peers`, where the peers are installed
    bench.py        rounds of all contenders in turn, and the table

Every contender delivers batches of 32 pictures and captions to the process that asks for them, on the same cores.
"""

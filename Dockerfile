# A node of a job: torch, redelastic, and the demo's training. `docker compose build` makes it.
FROM python:3.11.15-slim-bookworm

# As pip finds it by itself, torch is for NVIDIA's GPUs, several GB; PyTorch has an index of builds for CPUs, a tenth of that.
ARG TORCH_INDEX=
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0

# All else in the versions, and with the hashes, of the lock file, which `.ci/lock` renews
COPY image.lock /src/
RUN pip install --no-cache-dir --no-deps --require-hashes -r /src/image.lock

COPY pyproject.toml README.md LICENSE /src/
COPY redelastic /src/redelastic
RUN pip install --no-cache-dir --no-deps --no-build-isolation /src && pip check

RUN useradd --create-home node && install --directory --owner=node /checkpoints
USER node
WORKDIR /home/node
ENV OMP_NUM_THREADS=1
CMD ["redelastic", "--help"]

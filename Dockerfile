# The daemon, as an unprivileged user, with nothing that is only needed to build it. Everything it installs is
# pinned by hash. README shows the four lines that add your own handlers.
FROM python:3.13-slim AS build
WORKDIR /src
COPY requirements-build.lock requirements-runtime.lock ./
# Two environments: one to build the wheel with, and the one that goes into the image.
RUN python -m venv /opt/build \
 && /opt/build/bin/pip install --no-cache-dir --only-binary :all: --require-hashes -r requirements-build.lock \
 && python -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir --only-binary :all: --require-hashes -r requirements-runtime.lock
COPY pyproject.toml README.md LICENSE schema.sql ./
COPY worker worker
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /opt/wheel . \
 && /opt/venv/bin/pip install --no-cache-dir --no-deps /opt/wheel/*.whl

FROM python:3.13-slim
RUN useradd --uid 10001 --no-create-home --home-dir /app --shell /usr/sbin/nologin worker
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1
# Importable: put your package here and name it in WORKER_HANDLERS.
WORKDIR /app
USER 10001:10001
# It asks the state files of the processes in this container, not the database: an outage of that is no reason to kill.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 CMD ["worker", "health"]
ENTRYPOINT ["worker"]
CMD ["run"]

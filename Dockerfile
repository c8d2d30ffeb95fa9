# The image of daemonset.yaml: `docker build -t nodeagent:0.1.0 .`. Unpacked it has 196 MB, of which 167 are Debian.
# tests/vm builds it without a container engine, step by step in a chroot, and runs the result under runc.
#
# Python packages are pinned by constraints.txt, the base only by its release, so that a build includes Debian's security
# updates. A repeatable build names the digest (`docker buildx imagetools inspect debian:bookworm-slim`):
#   docker build --build-arg BASE=debian:bookworm-slim@sha256:... -t nodeagent:0.1.0 .
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv
COPY constraints.txt pyproject.toml README.md LICENSE /src/
COPY nodeagent /src/nodeagent
RUN python3 -m venv /opt/nodeagent \
 && /opt/nodeagent/bin/pip install --no-cache-dir 'pip==25.3' \
 && /opt/nodeagent/bin/pip install --no-cache-dir --constraint /src/constraints.txt /src

# The kubernetes package is 126 MB of 187 MB, and the agent uses its configuration, authentication and transport. The
# modules that the process never imports are removed; the last line fails the build if a release of the package needs one.
# Price: kubeconfigs with an `auth-provider` need the whole package; a pod has a service account.
RUN cd /opt/nodeagent/lib/python3.11/site-packages \
 && rm -r kubernetes/aio kubernetes/client/api kubernetes/client/apis kubernetes/client/models kubernetes/dynamic \
      kubernetes/informer kubernetes/leaderelection kubernetes/stream kubernetes/watch \
 && rm -r aiohappyeyeballs aiohttp aiohttp_retry aiosignal frozenlist multidict propcache yarl \
      pydantic pydantic_core pygments tzdata websocket pip setuptools \
 && find /opt/nodeagent -name tests -type d -prune -exec rm -r {} + \
 && /opt/nodeagent/bin/python -c 'from nodeagent.kube.kubernetes_client import load; assert load(kubeconfig=True).light'

FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/apt /var/log/dpkg.log
COPY --from=build /opt/nodeagent /opt/nodeagent
# Modules are compiled in the image, whose file system is read-only at run time. PATH for `kubectl exec POD -- nodeagent`.
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    PATH=/opt/nodeagent/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENTRYPOINT ["/opt/nodeagent/bin/nodeagent"]
CMD ["run"]

# The image of daemonset.yaml: `docker build -t nodeagent:0.1.0 .`. docs/image.md has platforms, digests and signatures.
#
# Unpacked it has 86 MB (27 MB to pull): Debian's Python with the libraries that it links, and the agent. There is no
# shell and no package manager. docs/image.md says what else was tried.
#
# Python packages are pinned by constraints.txt, the base only by its release, so that a build includes Debian's security
# updates. A repeatable build names the digest (`docker buildx imagetools inspect debian:bookworm-slim`):
#   docker build --build-arg BASE=debian:bookworm-slim@sha256:... -t nodeagent:0.1.0 .
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv
COPY constraints.txt pyproject.toml README.md LICENSE /src/
COPY nodeagent /src/nodeagent
RUN python3.11 -m venv /opt/nodeagent \
 && /opt/nodeagent/bin/pip install --no-cache-dir 'pip==25.3' \
 && /opt/nodeagent/bin/pip install --no-cache-dir --no-compile --report /src/report.json \
      --constraint /src/constraints.txt /src \
 && python3.11 -c 'import json; [print(each["metadata"]["name"], digest) \
for each in json.load(open("/src/report.json"))["install"] \
for digest in each["download_info"].get("archive_info", {}).get("hashes", {}).values()]' >/opt/nodeagent/wheels.txt

# The kubernetes package is 126 MB of 187 MB, and the agent uses its configuration, authentication and transport. The
# modules that the process never imports are removed, and with their metadata the packages that only they need.
# Price: kubeconfigs with an `auth-provider` need the whole package; a pod has a service account.
RUN cd /opt/nodeagent/lib/python3.11/site-packages \
 && rm -r kubernetes/aio kubernetes/client/api kubernetes/client/apis kubernetes/client/models kubernetes/dynamic \
      kubernetes/informer kubernetes/leaderelection kubernetes/stream kubernetes/watch \
 && rm -r aiohappyeyeballs* aiohttp* aiosignal* annotated_types* attr attrs* frozenlist* multidict* propcache* \
      pydantic* pygments* typing_inspection* tzdata* websocket* yarl* \
      pip* setuptools* pkg_resources _distutils_hack distutils-precedence.pth ../../../bin/pip* \
 && find /opt/nodeagent -name tests -type d -prune -exec rm -r {} +

# The root: packages of Debian without their scripts. What dpkg would know of them is in status.d, where scanners read it
# as in distroless images, with the hash of each package. Without the libraries of modules that nothing here imports:
# curses, dbm, nis, readline.
RUN mkdir -p /debs /image/var/lib/dpkg/status.d && cd /debs \
 && apt-get download base-files gcc-12-base libbz2-1.0 libc6 libcrypt1 libexpat1 libffi8 libgcc-s1 liblzma5 \
      libpython3.11-minimal libpython3.11-stdlib libsqlite3-0 libssl3 libuuid1 python3.11-minimal zlib1g \
 && for deb in *.deb; do \
      known=/image/var/lib/dpkg/status.d/$(dpkg-deb --field "$deb" Package) \
      && dpkg-deb --extract "$deb" /image \
      && dpkg-deb --info "$deb" md5sums >"$known.md5sums" \
      && dpkg-deb --field "$deb" >"$known" \
      && sha256sum <"$deb" | sed 's/\(.*\)  -/SHA256: \1/' >>"$known" || exit 1; \
    done \
 && find /image/usr/share/doc -type f ! -name copyright -delete \
 && echo 'hosts: files dns' >/image/etc/nsswitch.conf \
 && printf '%s:x:%s:%s::/:/usr/sbin/nologin\n' root 0 0 nonroot 65532 65532 >/image/etc/passwd \
 && printf '%s:x:%s:\n' root 0 nonroot 65532 >/image/etc/group

# Modules are compiled here, because the file system is read-only at run time; by the hash of their source instead of its
# time, so that two builds are equal. The last command fails the build if a module or a library is missing.
RUN compile='-m compileall -q -f --invalidation-mode unchecked-hash' \
 && python3.11 $compile /opt/nodeagent/lib \
 && mkdir /image/opt && cp -a /opt/nodeagent /image/opt \
 && chroot /image /usr/bin/python3.11 $compile /usr/lib/python3.11 \
 && chroot /image /opt/nodeagent/bin/python -c 'import ctypes, pyroute2, ssl; \
from nodeagent.kube.kubernetes_client import load; assert load(kubeconfig=True).light' \
 && rm -r /image/opt

FROM scratch
COPY --from=build /image /
COPY --from=build /opt/nodeagent /opt/nodeagent
# PATH for `kubectl exec POD -- nodeagent`.
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/nodeagent/bin:/usr/bin:/bin
ENTRYPOINT ["/opt/nodeagent/bin/nodeagent"]
CMD ["run"]

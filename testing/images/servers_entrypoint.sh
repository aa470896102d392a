# Runs a command in /data; without one, starts PostgreSQL as the image `postgres` does, with its variables.
set -eu
if [ $# -gt 0 ]; then
    cd /data
    exec "$@"
fi
data=/var/lib/postgresql/data
if [ ! -e $data/PG_VERSION ]; then
    initdb --pgdata=$data --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" --auth=scram-sha-256 \
        --encoding=UTF8 --locale=C
    echo "host all all all scram-sha-256" >> $data/pg_hba.conf
    pg_ctl --pgdata=$data --wait --options="-c listen_addresses= -c unix_socket_directories=/tmp" start
    PGPASSWORD=$(cat "$POSTGRES_PASSWORD_FILE") createdb --host=/tmp --username="$POSTGRES_USER" --maintenance-db=template1 "$POSTGRES_DB"
    pg_ctl --pgdata=$data --wait stop
fi
exec postgres -D $data -c listen_addresses='*' -c unix_socket_directories=/tmp

# Packs the working directory to standard output as a tar, at most $1 bytes and $2 entries, 64 folders deep. Says on
# standard error how many entries are left out because they are too much, and how many because they are special. Runs where the agent has no process: nothing changes meanwhile.
export LC_ALL=C
cd "$3" && [ -d work ] && [ ! -L work ] && cd work || { echo 'left 0 1' >&2; exit 0; }
chmod -R u+rwX . 2>/dev/null
{
    find . -mindepth 1 -maxdepth 64 ! -type f ! -type d ! -type l | sed 's/^/special /'
    find . -mindepth 65 -maxdepth 65 | sed 's/^/deep /'
    find . -mindepth 1 -maxdepth 64 \( -type d -o -type l \) | sed 's/^/0 /'
    find . -mindepth 1 -maxdepth 64 -type f -exec stat -c '%s %n' {} +
} 2>/dev/null | awk -v bytes="$1" -v entries="$2" '
    BEGIN { print "." }
    # tar reads a backslash in a list as the beginning of an escape; a line break in a name breaks the line
    /^[0-9]+ \.\// && !/\\/ && entries > 0 && $1 + 0 <= bytes {
        bytes -= $1; entries--
        sub(/^[0-9]+ /, ""); print
        next
    }
    /^deep / || (/^[0-9]+ \.\// && !/\\/) { much++; next }
    { special++ }
    END { printf "left %d %d\n", much, special | "cat 1>&2" }
' | tar -cf - --no-recursion -T - 2>/dev/null
exit 0

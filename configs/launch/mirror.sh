#!/usr/bin/env bash
# Copy a folder to a store and back, for machines that may be taken away. It is the folder of the runs, or of one run:
#
#     configs/launch/mirror.sh down checkpoints s3://my-bucket/runs     # before the run: a new machine gets the folder
#     configs/launch/mirror.sh up checkpoints s3://my-bucket/runs 60 &  # beside the run: copies, waits 60 s, copies ...
#     configs/launch/mirror.sh up checkpoints s3://my-bucket/runs       # copies once; in cron after `flock -n FILE`
#
# LM_MIRROR_TOOL names the tool that copies: `aws` (s3://bucket/folder; the default), `rclone` (remote:bucket/folder) or
# `rsync` (host:folder, or a folder of another disk). It finds its credentials as it always does.
#
# `up` copies what has changed, without symbolic links. The trainer.json of a checkpoint comes after all other files, so
# that `--ckpt_path auto` passes over a checkpoint that was cut off by a kill. A checkpoint that the run has removed is
# deleted from the store once all others are there; nothing else is deleted. Hard links keep the files until they are
# copied, which takes the disk space of one more checkpoint. SIGTERM ends the loop after a last copy.
#
# `down` changes nothing if the store is empty, or if it has what this folder was copied to last. Otherwise the store
# belongs to the new folder from then on: `up` from another, such as that of a machine taken for dead, is refused.
#
# It needs the tools of GNU, as on Linux. Exit codes: 0 done, 1 not all could be copied (the same command continues), 2 refused.
set -uo pipefail

say() { echo "mirror.sh: $*" >&2; }
refuse() { say "$*" && exit 2; }

[[ $# -ge 3 && $1 =~ ^(up|down)$ ]] || refuse "give up or down, a folder, and where its copy is"
direction=$1 folder=${2%/} store=${3%/} pause=${4:-} tool=${LM_MIRROR_TOOL:-aws}
own=$folder/.mirror # `owner`, as in the store; `checkpoints` that may be in the store; `files` to copy
command -v "$tool" > /dev/null || refuse "$tool is not installed"
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
mkdir "$scratch/empty"

copy() { # FROM TO [--exclude PATTERN]: the files that differ; none if there is no FROM in the store
    case $tool in
        aws) aws s3 sync --only-show-errors "$@" ;;
        rclone) rclone copy --local-no-check-updated "$@" || [ $? -eq 3 ] ;; # curves grow meanwhile; 3: no such folder
        rsync) rsync -rt --mkpath --prune-empty-dirs "$1/" "$2/" "${@:3}" ;;
        *) refuse "LM_MIRROR_TOOL is $tool: give aws, rclone or rsync" ;;
    esac
}

remove() { # a folder in the store
    case $tool in
        aws) aws s3 rm --recursive --only-show-errors "$1" ;;
        rclone) rclone purge "$1" || [ $? -eq 3 ] ;;
        rsync) rsync -r --delete "$scratch/empty/" "$1/" ;; # leaves an empty folder
    esac
}

read_owners() { # of the store and of this folder
    rm -rf "$scratch/theirs"
    [ "$tool" != rsync ] || rsync -r --mkpath "$scratch/empty/" "$store/.mirror/" # which cannot read what is not there
    copy "$store/.mirror" "$scratch/theirs" || return
    theirs=$(cat "$scratch/theirs/owner" 2> /dev/null)
    mine=$(cat "$own/owner" 2> /dev/null) || true
}

become_owner() { # by the `owner` of folder $1
    mkdir -p "$1/.mirror" "$scratch/mine"
    [ -e "$1/.mirror/owner" ] || echo "$HOSTNAME:$(realpath "$folder") since $(date -u +%FT%T.%NZ)" > "$1/.mirror/owner"
    cp "$1/.mirror/owner" "$scratch/mine" && copy "$scratch/mine" "$store/.mirror"
}

checkpoints_in() { find "$1" -type d -name 'step-*' -printf '%P\n' | sort; }

snapshot() { # into .mirror/files; again if the run has replaced or removed one of the files meanwhile
    local error
    for _ in {1..20}; do
        rm -rf "$own/files" && mkdir -p "$own/files"
        error=$(cd "$folder" && find . -type f ! -path '*/.*' ! -name run.lock \
            -exec cp -l --parents -t .mirror/files {} + 2>&1) && return
    done
    say "$error" && return 1
}

copy_up() {
    local old
    [ -d "$folder" ] || { say "there is no folder $folder yet" && return; }
    read_owners || return
    [ -z "$theirs" ] || [ "$theirs" = "$mine" ] ||
        refuse "$store is a copy of $theirs: give another destination, or bring it \`down\` into a new folder"
    snapshot || return
    checkpoints_in "$own/files" > "$own/now"
    cat "$own/now" >> "$own/checkpoints"
    copy "$own/files" "$store" --exclude '*trainer.json' && copy "$own/files" "$store" || return
    [ -n "$theirs" ] || become_owner "$folder" || return
    for old in $(sort -u "$own/checkpoints" | grep -vxFf "$own/now"); do
        if compgen -G "$own/files/${old%step-*}step-*" > /dev/null; then # the run has others
            remove "$store/$old" || return
        else
            echo "$old" >> "$own/now"
        fi
    done
    mv "$own/now" "$own/checkpoints" && rm -r "$own/files"
}

copy_down() {
    local part=$folder.part # what a kill has interrupted continues there
    read_owners || return
    rmdir "$folder" 2> /dev/null # where it is empty
    if [ -e "$folder" ]; then
        [ -z "$theirs" ] || [ "$theirs" = "$mine" ] || refuse "$store is a copy of $theirs: move $folder away first"
        say "$folder stays as it is" && return
    fi
    rm -rf "$part/.mirror"
    [ -z "$theirs" ] || become_owner "$part" || return # first, so that what is copied does not change meanwhile
    copy "$store" "$part" --exclude '.mirror/*' || return
    rmdir "$part" 2> /dev/null
    [ -e "$part" ] || { say "there is nothing in $store yet" && return; }
    [ -n "$theirs" ] || become_owner "$part" || return
    checkpoints_in "$part" > "$part/.mirror/checkpoints"
    mv "$part" "$folder" && say "$folder has come from $store"
}

if [ "$direction" = up ] && [ "$pause" ]; then
    trap 'pause=' TERM INT
    while [ "$pause" ]; do
        copy_up || say "not all of $folder is in $store${pause:+; the next copy is in $pause s}"
        [ -z "$pause" ] || { sleep "$pause" & wait $!; kill $! 2> /dev/null; } # a signal ends only `wait`
    done
fi
"copy_$direction" || { say "not all of $folder could be copied" && exit 1; }

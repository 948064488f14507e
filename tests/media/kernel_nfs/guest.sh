#!/bin/bash
# The first process of a machine in user-mode Linux, whose root is the host's, read-only. $WORK is shared with the host.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME="$WORK" TMPDIR=/dev/shm PYTHONDONTWRITEBYTECODE=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2> /dev/null
mkdir -p /dev/shm
for folder in /dev/shm /run /mnt /var/lib/nfs; do
    mount -t tmpfs tmpfs "$folder"
done
mount -t hostfs none "$WORK" -o "$WORK"
ip link set lo up
for module in sunrpc nfs nfsv3 nfsv4 nfsd sch_netem dm-mod; do
    modprobe -d "$WORK" "$module"
done
cd "$REPOSITORY" || exit
"$PYTHON" -m pytest -p no:cacheprovider --basetemp=/dev/shm/tests -rs tests/media/kernel_nfs/checks.py > "$WORK/output" 2>&1
echo $? > "$WORK/exit-status"
sync
echo o > /proc/sysrq-trigger
sleep 60

#!/bin/busybox sh
# The guest's first process: mounts, loads modules, runs /task, reports on the second serial port, powers off.
# The report: a line with exit status, kernel, clock source and seconds since boot, then /tmp/report if there is one.

/bin/busybox --install -s /bin
for mount in proc:/proc sysfs:/sys devtmpfs:/dev devpts:/dev/pts tmpfs:/dev/shm tmpfs:/tmp tmpfs:/run; do
    mkdir -p "${mount#*:}"
    mount -t "${mount%%:*}" none "${mount#*:}"
done
modprobe -a veth bridge tun dummy sch_netem sch_htb sch_tbf sch_fq sch_prio sch_ingress \
    cls_u32 cls_flower cls_basic cls_matchall cls_fw act_mirred act_police tcp_bbr tcp_diag udp_diag
ip link set lo up
sh /task
status=$?
clock=$(cat /sys/devices/system/clocksource/clocksource0/current_clocksource)
{
    echo "$status $(uname -r) $clock $(cut -d ' ' -f 1 /proc/uptime)"
    cat /tmp/report
} > /dev/ttyS1 2> /dev/null
poweroff -f

# trace.sh with a VM as the RT server.
vm=1
. /lab/trace.sh

{{/* Labels of every object. */}}
{{- define "nodeagent.labels" -}}
app.kubernetes.io/name: nodeagent
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Host paths by distribution: kubelet, images, and the directories with the kubelet's configuration. */}}
{{- define "nodeagent.paths" -}}
{{- $all := dict
  "kubeadm" (dict "kubelet" "/var/lib/kubelet" "images" "/var/lib/containerd" "config" (list))
  "k3s" (dict "kubelet" "/var/lib/kubelet" "images" "/var/lib/rancher/k3s/agent/containerd"
    "config" (list "/var/lib/rancher/k3s/agent/etc"))
  "rke2" (dict "kubelet" "/var/lib/kubelet" "images" "/var/lib/rancher/rke2/agent/containerd"
    "config" (list "/var/lib/rancher/rke2/agent/etc"))
  "talos" (dict "kubelet" "/var/lib/kubelet" "images" "/var/lib/containerd" "config" (list "/etc/kubernetes"))
  "openshift" (dict "kubelet" "/var/lib/kubelet" "images" "/var/lib/containers" "config" (list "/etc/kubernetes"))
  "eks" (dict "kubelet" "/var/lib/kubelet" "images" "/var/lib/containerd" "config" (list "/etc/kubernetes/kubelet"))
  "gke" (dict "kubelet" "/var/lib/kubelet" "images" "/var/lib/containerd" "config" (list "/home/kubernetes"))
  "aks" (dict "kubelet" "/var/lib/kubelet" "images" "/var/lib/containerd" "config" (list))
-}}
{{- $paths := get $all .Values.distribution -}}
{{- if not $paths -}}{{- fail (printf "distribution %q is none of %s" .Values.distribution (keys $all | sortAlpha | join ", ")) -}}{{- end -}}
{{- $own := .Values.hostPaths -}}
{{- dict
  "kubelet" (default $paths.kubelet $own.kubelet)
  "images" (default $paths.images $own.images)
  "config" (ternary $paths.config $own.kubeletConfig (kindIs "invalid" $own.kubeletConfig))
  | toJson -}}
{{- end }}

{{/* The configuration file: `config` with the header, the image directory where it is not the usual one, and the
release's namespace where it is not the built-in one. */}}
{{- define "nodeagent.config" -}}
{{- $paths := include "nodeagent.paths" . | fromJson -}}
{{- $config := deepCopy .Values.config -}}
{{- if not (has $paths.images (list "/var/lib/containerd" "/var/lib/containers")) -}}
{{- $config = mergeOverwrite (dict "sampling" (dict "imageDir" $paths.images)) $config -}}
{{- end -}}
{{- if ne .Release.Namespace "nodeagent" -}}
{{- $protection := default dict $config.protection -}}
{{- if not (kindIs "slice" $protection.namespaces) -}}
{{- $_ := set $protection "namespaces" (list "kube-system" .Release.Namespace) -}}
{{- $_ := set $config "protection" $protection -}}
{{- end -}}
{{- $_ := set $config "fleet" (mergeOverwrite (default dict $config.fleet) (dict "leaseNamespace" (include "nodeagent.leaseNamespace" .))) -}}
{{- end -}}
{{- mergeOverwrite $config (dict "apiVersion" "nodeagent.io/v1alpha1" "kind" "NodeAgentConfiguration") | toYaml -}}
{{- end }}

{{/* Where the Leases of a fleet are. */}}
{{- define "nodeagent.leaseNamespace" -}}
{{- default .Release.Namespace (default dict .Values.config.fleet).leaseNamespace -}}
{{- end }}

{{/* The values of a key (its path as a list) in `config` and in each of its profiles, except false, 0, "" and a duration of 0. */}}
{{- define "nodeagent.valuesOf" -}}
{{- range $value := prepend (default list .config.profiles) .config -}}
{{- range $.path -}}{{- $value = default dict (get $value .) -}}{{- end -}}
{{- if and $value (not (regexMatch "^\\+?([0.]+(ns|us|µs|μs|ms|s|m|h)?)+$" (toString $value))) }} {{ $value }}{{ end -}}
{{- end -}}
{{- end }}

{{/* The port of the endpoint, or an error for an address that the probes, which ask the pod's own, do not reach. */}}
{{- define "nodeagent.metricsPort" -}}
{{- $address := default "" (default dict .Values.config.metrics).address -}}
{{- if not (regexMatch "^(0\\.0\\.0\\.0|\\[::\\])?:[1-9][0-9]*$" $address) -}}
{{- fail (printf "config.metrics.address is %q: the probes need a port on every address of the pod, such as :9655" $address) -}}
{{- end -}}
{{- splitList ":" $address | last -}}
{{- end }}

{{/* Nothing, or an error for values that exclude each other. */}}
{{- define "nodeagent.checkValues" -}}
{{- if and .Values.nonRoot (or (eq .Values.mode "enforce") .Values.brake.enabled) -}}
{{- fail "nonRoot is a dry run: not with mode enforce or brake.enabled" -}}
{{- end -}}
{{- end }}

{{/* "true" or empty: rights on pods that do not go through the node's identity. */}}
{{- define "nodeagent.directRights" -}}
{{- if eq (toString .Values.directRights) "auto" -}}
{{- if semverCompare "<1.36.0-0" .Capabilities.KubeVersion.Version -}}true{{- end -}}
{{- else if eq (toString .Values.directRights) "true" -}}true{{- end -}}
{{- end }}

{{- define "nodeagent.seLinuxType" -}}
{{- if ne .Values.seLinuxType "auto" -}}{{ .Values.seLinuxType }}
{{- else if eq .Values.distribution "openshift" -}}spc_t{{- end -}}
{{- end }}
